"""Writes a recorder ring as the C data plane does, for tests. Offsets are spelled out, not taken from the decoder."""

from __future__ import annotations

import struct

from keepstep.records.ring import OpSlot, PeerSlot, SpanSlot

__all__ = ["RingWriter"]


class RingWriter:
    """A ring in a bytearray. `put` adds one operation and its peer slots."""

    def __init__(
        self, capacity: int, *, rank: int = 3, member: bytes = b"n1-3", offset_ns: int = 10**18, generation: int = 5
    ) -> None:
        self.buffer = bytearray(8192 + 65536 + capacity * 128 + 32768)
        self.capacity = capacity
        self.head = 0
        self.put_at(0, "<8sIIQ", b"KSRING01", 1, 128, capacity)
        self.put_at(40, "<QqIiIIQ48s", 777, offset_ns, 4242, rank, generation, 1, 12, member)
        self.generation = generation

    def put_at(self, offset: int, layout: str, *values: object) -> None:
        """Pack values anywhere."""
        struct.pack_into(layout, self.buffer, offset, *values)

    def put_group(
        self, place: int, name: bytes, *, group_hash: int, counts: tuple[int, int, int], size: int = 4
    ) -> None:
        """Fill one entry of the group table."""
        self.put_at(128 + place * 128, "<56sIIIiQQQI", name, group_hash, 0, size, 1, *counts, self.generation)

    def reserve(self) -> int:
        """Take the next index without writing its slot."""
        self.head += 1
        self.put_at(24, "<Q", self.head)
        return self.head - 1

    def put(self, op: OpSlot) -> None:
        """Write an operation and its peers; their indices are given by the ring."""
        index = self.reserve()
        at = self._start(index)
        self.put_at(at + 8, "<6BH", 1, op.op, op.algorithm, op.element, op.reduction, op.status, len(op.peers))
        self.put_at(at + 16, "<IIQq", op.group_hash, op.generation, op.sequence, op.step)
        self.put_at(
            at + 40, "<5QIi", op.count, op.nbytes, op.queued_ns, op.started_ns, op.finished_ns, op.rank, op.root
        )
        self.put_at(at, "<Q", index + 1)
        for peer in op.peers:
            self._put_peer(index, peer)

    def put_span(self, span: SpanSlot) -> None:
        """Write a span; its index is given by the ring."""
        index = self.reserve()
        at = self._start(index)
        self.put_at(at + 8, "<6BH", 3, span.what, 0, 0, 0, span.status, 0)
        self.put_at(at + 16, "<qQQI", span.step, span.began_ns, span.ended_ns, span.generation)
        self.put_at(at, "<Q", index + 1)

    def _put_peer(self, op_index: int, peer: PeerSlot) -> None:
        index = self.reserve()
        at = self._start(index)
        self.put_at(at + 8, "<6BH", 2, 0, 0, 0, 0, 0, 0)
        waits = (peer.wait_own_ns, peer.wait_credit_ns, peer.wire_ns, peer.wait_peer_ns)
        self.put_at(
            at + 16, "<QiI6Q", op_index, peer.peer, peer.transport, peer.bytes_sent, peer.bytes_received, *waits
        )
        self.put_at(at, "<Q", index + 1)

    def _start(self, index: int) -> int:
        at = 73728 + (index % self.capacity) * 128
        self.put_at(at, "<Q", 0)
        return at
