"""What an agent hands over for a finding: rings, stacks and counters of its members. Taken in a thread of its own."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from keepstep.records.messages import MAX_MESSAGE_BYTES
from keepstep.records.watch_messages import EvidenceGiven, GiveEvidence
from keepstep.service.counters import host_counters, process_counters
from keepstep.service.flight_dumps import ask_for_dump, dump_of
from keepstep.service.member_process import MemberProcess
from keepstep.service.stacks import take_stack

__all__ = ["EvidenceGiver"]

_MOST_STACK_CHARACTERS = 200_000
_MOST_PACKED_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_LEVEL = 1
_DUMP_S = 2.0


class EvidenceGiver:
    """Answers `GiveEvidence`. `report` is called from its thread, once a member and once for the node."""

    def __init__(
        self,
        members: Callable[[], Iterable[MemberProcess]],
        report: Callable[[EvidenceGiven], None],
        *,
        directory: Path,
    ) -> None:
        """`members()` gives the processes that run now; their logs and dumps are under `directory`."""
        self._members = members
        self._report = report
        self._directory = directory
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="keepstep-evidence")

    def give(self, order: GiveEvidence) -> None:
        """Take the evidence of all members of this node, and hand it over piece by piece."""
        self._taker.submit(self._take, order, list(self._members()))

    def close(self) -> None:
        """Wait for what was asked for."""
        self._taker.shutdown(wait=True)

    def _take(self, order: GiveEvidence, members: list[MemberProcess]) -> None:
        """Stacks first, all close together; then dumps and rings."""
        logs = self._directory / "logs"
        stacks = {m.name: take_stack(m.process.pid, logs / f"{m.name}.log") for m in members}
        asked = [m for m in members if not m.protected and ask_for_dump(self._directory, m.rank)]
        if asked:
            time.sleep(_DUMP_S)
        self._report(EvidenceGiven(order.finding, "", -1, counters=msgspec.json.encode(host_counters())))
        for member in members:
            self._report(
                EvidenceGiven(
                    finding=order.finding,
                    member=member.name,
                    rank=member.rank,
                    ring=_ring(member) if member.rank in order.rings else b"",
                    dump=_packed(dump_of(self._directory, member.rank)) if member in asked else b"",
                    stack=stacks[member.name].text()[:_MOST_STACK_CHARACTERS],
                    counters=msgspec.json.encode(process_counters(member.process.pid)),
                )
            )


def _ring(member: MemberProcess) -> bytes:
    """A compressed copy of the whole ring; empty if it is gone or too large for one message."""
    with member.ring.held() as view:
        copy = b"" if view is None else bytes(view)
    return _packed(copy)


def _packed(data: bytes) -> bytes:
    packed = zlib.compress(data, _LEVEL)
    return packed if data and len(packed) <= _MOST_PACKED_BYTES else b""
