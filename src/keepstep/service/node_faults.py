"""Drills that hit a whole node, in its agent: everything is gone at once, or its ranks die again and again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable

from keepstep.records.messages import Drill, Drilled
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.member_process import MemberProcess

__all__ = ["NodeFaults"]

_POLL_S = 0.005
_TELL_S = 0.1
"""What the last word of an agent gets to leave this machine."""


def _end_of_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class NodeFaults:
    """The armed drills of one node; looks at the recorder headers while any is armed."""

    def __init__(
        self,
        members: Callable[[], Iterable[MemberProcess]],
        *,
        clock: Clock,
        report: Callable[[Drilled], None],
        vanish: Callable[[], None] = _end_of_this_process,
    ) -> None:
        """`members()` gives the processes that run now, `report` takes what was done, `vanish` ends the agent."""
        self._members = members
        self._clock = clock
        self._report = report
        self._vanish = vanish
        self._armed: list[Drill] = []
        self._struck: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def arm(self, drill: Drill) -> None:
        """Do it as soon as a rank of this node is at the step of `drill`; with `stop`, do it no more."""
        if drill.stop:
            self._armed = [other for other in self._armed if other.fault != drill.fault]
            self._report(Drilled(drill.fault, drill.rank, -1, self._clock.wall(), ended=True))
            return
        self._armed.append(drill)
        if self._task is None or self._task.done():
            self._task = background(self._watch())

    def close(self) -> None:
        """Forget what is armed."""
        self._armed.clear()

    async def _watch(self) -> None:
        while self._armed:
            for drill in tuple(self._armed):
                if drill.fault == "bad-release":
                    self._strike(drill)
                elif drill.step < 0 or any(self._reached(member, drill) for member in self._members()):
                    await self._lose(drill)
            await asyncio.sleep(_POLL_S)

    def _reached(self, member: MemberProcess, drill: Drill) -> bool:
        return member.rank >= 0 and member.protected and member.ring.step() >= max(drill.step, 1)

    async def _lose(self, drill: Drill) -> None:
        """All processes of this node at once, this one last."""
        self._armed.remove(drill)
        members = tuple(self._members())
        step = max((member.ring.step() for member in members if member.rank >= 0), default=-1)
        self._report(Drilled(drill.fault, drill.rank, step, self._clock.wall()))
        await asyncio.sleep(_TELL_S)
        for member in members:
            member.process.send(signal.SIGKILL)
        self._vanish()

    def _strike(self, drill: Drill) -> None:
        """Every rank that works on this node dies, those that come later too."""
        for member in tuple(self._members()):
            if member.name not in self._struck and self._reached(member, drill):
                self._struck.add(member.name)
                self._report(Drilled(drill.fault, member.rank, member.ring.step(), self._clock.wall()))
                member.process.send(signal.SIGKILL)
