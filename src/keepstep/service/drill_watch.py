"""Drills in the agent: wait until a rank reaches a step, then kill or freeze it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable

from keepstep.records.messages import Drill, Drilled
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.member_process import MemberProcess

__all__ = ["DrillWatch"]

_POLL_S = 0.001
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class DrillWatch:
    """Holds the armed drills of one agent; looks at the recorder headers every millisecond while any is armed."""

    def __init__(
        self, members: Callable[[], Iterable[MemberProcess]], *, clock: Clock, report: Callable[[Drilled], None]
    ) -> None:
        """`members()` gives the processes that run now; `report` gets what was injected."""
        self._members = members
        self._clock = clock
        self._report = report
        self._armed: list[Drill] = []
        self._task: asyncio.Task[None] | None = None

    def arm(self, drill: Drill) -> None:
        """Inject `drill` as soon as its rank is at its step (at once if it is further, or the step is -1)."""
        self._armed.append(drill)
        if self._task is None or self._task.done():
            self._task = background(self._watch())

    def close(self) -> None:
        """Forget what is armed."""
        self._armed.clear()

    async def _watch(self) -> None:
        while self._armed:
            for drill in tuple(self._armed):
                if (member := self._due(drill)) is not None:
                    self._armed.remove(drill)
                    self._inject(drill, member)
            await asyncio.sleep(_POLL_S)

    def _due(self, drill: Drill) -> MemberProcess | None:
        for member in self._members():
            if member.rank == drill.rank and (
                drill.step < 0 or (member.protected and member.ring.step() >= drill.step)
            ):
                return member
        return None

    def _inject(self, drill: Drill, member: MemberProcess) -> None:
        step = member.ring.step()
        at = self._clock.wall()
        member.process.send(_SIGNALS[drill.fault])
        self._report(Drilled(drill.fault, drill.rank, step, at))
