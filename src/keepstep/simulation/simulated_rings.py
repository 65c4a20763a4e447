"""The recorder ring of one member of a simulated job, slot by slot: what the agent's summariser reads in earnest."""

from __future__ import annotations

import numpy as np

from keepstep.records.ring import SpanKind
from keepstep.records.ring_layout import (
    COMMON,
    GROUP,
    GROUP_BYTES,
    GROUPS_OFFSET,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    OP,
    PEER,
    SLOT_BODY,
    SLOT_BYTES,
    SLOTS_OFFSET,
    SPAN,
    ring_bytes,
)
from keepstep.simulation.simulated_records import CALLS, JobModel, StepTimes

__all__ = ["MemberRing"]

_OPS = {"tp": 1, "pp": 10, "dp": 5, "ep": 6}
_OPERATION, _PEER, _SPAN = 1, 2, 3
_DONE = 2
_FLOAT32 = 10


class MemberRing:
    """The memory of `rank` in `model`, with room for `capacity` slots. `write` adds a step that is over."""

    def __init__(self, model: JobModel, rank: int, *, capacity: int = 16384) -> None:
        self.memory = bytearray(ring_bytes(capacity))
        self.now_ns = 10**12
        self._model = model
        self._rank = rank
        self._capacity = capacity
        self._head = 0
        self._near = {kind: model.layout.neighbours(kind)[rank] for kind in model.layout.kinds()}
        self._groups = {
            kind: int(model.layout.group_hash(kind, model.layout.places(kind)[0][rank])) for kind in self._near
        }
        for number, (kind, value) in enumerate(self._groups.items()):
            size, place = model.layout.groups(kind).shape[1], int(model.layout.places(kind)[1][rank])
            entry = (kind.encode(), value, int(kind == "pp"), size, place, 1, 1, 1, model.generation)
            GROUP.pack_into(self.memory, GROUPS_OFFSET + number * GROUP_BYTES, *entry)
        self._header(0)

    def write(self, step: int, times: StepTimes) -> None:
        """The slots of one step: its spans, and `CALLS` collectives of each kind one after the other."""
        rank = self._rank
        own, data, lasted, outside = (
            int(float(part[rank]) * 1e3) for part in (times.own, times.data, times.duration, times.outside)
        )
        began = self.now_ns + outside
        self._span(SpanKind.STEP, step, began=began, ended=began + lasted)
        self._span(SpanKind.DATA, step, began=began, ended=began + data)
        at = began + data + own
        share = (lasted - data - own) // (CALLS * len(self._near))
        for kind in self._near:
            for call in range(CALLS):
                self._call(kind, step, when=(step * CALLS + call, at, at + share), times=times)
                at += share
        self.now_ns = began + lasted
        self._header(step + 1)

    def _header(self, step: int) -> None:
        HEADER.pack_into(
            self.memory, 0, MAGIC, LAYOUT_VERSION, SLOT_BYTES, self._capacity, self._head, 0, self.now_ns, 0, 1,
            self._rank, self._model.generation, 1, step, b"simulated",
        )  # fmt: skip

    def _slot(self, kind: int, op: int, *, peers: int) -> int:
        at = SLOTS_OFFSET + self._head % self._capacity * SLOT_BYTES
        self._head += 1
        COMMON.pack_into(self.memory, at, self._head, kind, op, 1, _FLOAT32, 0, _DONE, peers)
        return at + SLOT_BODY

    def _span(self, what: SpanKind, step: int, *, began: int, ended: int) -> None:
        SPAN.pack_into(self.memory, self._slot(_SPAN, what, peers=0), step, began, ended, self._model.generation)

    def _call(self, kind: str, step: int, *, when: tuple[int, int, int], times: StepTimes) -> None:
        near = [(side, int(peer)) for side, peer in enumerate(self._near[kind]) if peer >= 0]
        sequence, began, ended = when
        index = self._head
        OP.pack_into(
            self.memory, self._slot(_OPERATION, _OPS[kind], peers=len(near)),
            self._groups[kind], self._model.generation, sequence, step, 1000, int(1e8 / CALLS),
            began, began, ended, self._rank, 0,
        )  # fmt: skip
        for side, peer in near:
            wire, wait = (
                int(float(np.asarray(part[kind])[self._rank, side]) * 1e3 / CALLS)
                for part in (times.send, times.receive)
            )
            sent = int(1e8 / CALLS)
            PEER.pack_into(
                self.memory, self._slot(_PEER, _OPS[kind], peers=0), index, peer, 2, sent, sent, 0, 0, wire, wait
            )
