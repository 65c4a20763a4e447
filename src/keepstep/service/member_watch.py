"""Everything an agent does to watch its members: the observer, evidence on demand, checks of a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.records.messages import Fact
from keepstep.records.plain_samples import PlainReport
from keepstep.records.summary import WatchReport
from keepstep.records.watch_messages import (
    CheckHang,
    EvidenceGiven,
    GiveEvidence,
    HangDenied,
    NodeProbed,
    PlainSeen,
    ProbeLinks,
    ProbeNode,
    TellCalls,
    Watched,
    WatchOrder,
)
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.evidence_giver import EvidenceGiver
from keepstep.service.hang_check import check_hang
from keepstep.service.last_calls import newest_calls
from keepstep.service.member_process import MemberProcess
from keepstep.service.node_probe import probe_node
from keepstep.service.observer import Observer

__all__ = ["MemberWatch"]


class MemberWatch:
    """The watch of one agent from `open()` to `close()`, in its event loop and in threads beside it."""

    def __init__(
        self,
        node: str,
        members: Callable[[], tuple[MemberProcess, ...]],
        *,
        upward: Callable[[str, Fact], None],
        last_words: Callable[[str], tuple[dict[int, bytes], float]],
        directory: Path,
        clock: Clock,
    ) -> None:
        """`last_words(member)` gives what it published last and the onset, as a loss needs them. `directory` is that of
        the run."""
        self._node = node
        self._clock = clock
        self._members = members
        self._upward = upward
        self._last_words = last_words
        self._logs = directory / "logs"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._observer = Observer(node, members, clock=clock, report=self._on_report)
        self._giver = EvidenceGiver(members, self._on_evidence, directory=directory)
        self._checks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to watch; to be called in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._observer.open()

    def obey(self, order: WatchOrder) -> None:
        """Give evidence, say what members called, or check whether one hangs."""
        if isinstance(order, GiveEvidence):
            self._giver.give(order)
            return
        if isinstance(order, TellCalls):
            for member in self._members():
                self.tell_calls(member)
            return
        if isinstance(order, ProbeLinks):
            return  # for the member itself
        task = background(self._probe(order) if isinstance(order, ProbeNode) else self._check(order))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def tell_calls(self, member: MemberProcess) -> None:
        """Say what `member` called last, while its ring is still there."""
        if member.rank >= 0 and (called := newest_calls(member)) is not None:
            self._upward(member.name, called)

    async def close(self) -> None:
        """Stop watching."""
        for task in self._checks:
            task.cancel()
        await asyncio.to_thread(self._observer.close)
        await asyncio.to_thread(self._giver.close)

    async def _check(self, order: CheckHang) -> None:
        member = next((m for m in self._members() if m.name == order.member), None)
        if member is None:
            self._upward("", HangDenied(order.member, -1, "its process is gone"))
            return
        verdict = await check_hang(member, order, log=self._logs / f"{member.name}.log")
        if isinstance(verdict, HangDenied) or member.ended_by_order:
            self._upward("", verdict)
            return
        private, onset = self._last_words(member.name)
        self._upward(member.name, msgspec.structs.replace(verdict, private=private, onset=onset))

    async def _probe(self, order: ProbeNode) -> None:
        member = next((m for m in self._members() if m.rank == order.rank), None)
        if member is None:
            self._upward("", NodeProbed(order.finding, order.rank, self._node, 0.0, note="its process is gone"))
            return
        log = self._logs / f"{member.name}.log"
        self._upward(
            "", await asyncio.to_thread(probe_node, member, order, node=self._node, clock=self._clock, log=log)
        )

    def _on_report(self, report: WatchReport | PlainReport) -> None:
        self._from_thread(PlainSeen(report) if isinstance(report, PlainReport) else Watched(report))

    def _on_evidence(self, piece: EvidenceGiven) -> None:
        self._from_thread(piece)

    def _from_thread(self, fact: Watched | PlainSeen | EvidenceGiven) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._upward, "", fact)
