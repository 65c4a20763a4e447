"""What an agent hands over for a finding: rings, stacks and counters of its members. Taken in a thread of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from keepstep.records.messages import MAX_MESSAGE_BYTES
from keepstep.records.watch_messages import EvidenceGiven, GiveEvidence
from keepstep.service.counters import host_counters, process_counters
from keepstep.service.member_process import MemberProcess
from keepstep.service.stacks import take_stack

__all__ = ["EvidenceGiver"]

_MOST_STACK_CHARACTERS = 200_000
_MOST_RING_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_LEVEL = 1


class EvidenceGiver:
    """Answers `GiveEvidence`. `report` is called from its thread, once a member and once for the node."""

    def __init__(
        self, members: Callable[[], Iterable[MemberProcess]], report: Callable[[EvidenceGiven], None], *, logs: Path
    ) -> None:
        """`members()` gives the processes that run now; what they print is in `logs`."""
        self._members = members
        self._report = report
        self._logs = logs
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="keepstep-evidence")

    def give(self, order: GiveEvidence) -> None:
        """Take the evidence of all members of this node, and hand it over piece by piece."""
        self._taker.submit(self._take, order, list(self._members()))

    def close(self) -> None:
        """Wait for what was asked for."""
        self._taker.shutdown(wait=True)

    def _take(self, order: GiveEvidence, members: list[MemberProcess]) -> None:
        """Stacks first, all close together; then the rings."""
        stacks = {m.name: take_stack(m.process.pid, self._logs / f"{m.name}.log") for m in members}
        self._report(EvidenceGiven(order.finding, "", -1, counters=msgspec.json.encode(host_counters())))
        for member in members:
            self._report(
                EvidenceGiven(
                    finding=order.finding,
                    member=member.name,
                    rank=member.rank,
                    ring=_ring(member) if member.rank in order.rings else b"",
                    stack=stacks[member.name].text()[:_MOST_STACK_CHARACTERS],
                    counters=msgspec.json.encode(process_counters(member.process.pid)),
                )
            )


def _ring(member: MemberProcess) -> bytes:
    """A compressed copy of the whole ring; empty if it is gone or too large for one message."""
    with member.ring.held() as view:
        copy = b"" if view is None else bytes(view)
    packed = zlib.compress(copy, _LEVEL)
    return packed if copy and len(packed) <= _MOST_RING_BYTES else b""
