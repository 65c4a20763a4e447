"""Drills in the agent: wait until a rank reaches a step, then signal it; what only the process can do is passed on.

Two drills belong to the start of a rank: a process that never comes to `join()`, and one that names another version.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable

import msgspec

from keepstep.records.drills import DRILLS
from keepstep.records.messages import Drill, Drilled, Hello, MemberFact
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.member_process import MemberProcess
from keepstep.service.node_faults import NodeFaults

__all__ = ["DrillWatch", "drilled_command", "drilled_fact"]

_POLL_S = 0.001
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
_OTHER_VERSION = "0.0.0+drill"


def drilled_command(command: list[str], drill: str) -> list[str]:
    """What to start in place of `command` under the start-up fault `drill` ("": none)."""
    if drill == "never-start":
        return [sys.executable, "-c", "import signal\nwhile True: signal.pause()"]
    return command


def drilled_fact(fact: MemberFact, drill: str) -> MemberFact:
    """What the agent passes on in place of `fact` under the start-up fault `drill` ("": none)."""
    if drill == "wrong-version" and isinstance(fact, Hello):
        return msgspec.structs.replace(fact, keepstep_version=_OTHER_VERSION)
    return fact


class DrillWatch:
    """Holds the armed drills of one agent; looks at the recorder headers every millisecond while any is armed."""

    def __init__(
        self, members: Callable[[], Iterable[MemberProcess]], *, clock: Clock, report: Callable[[Drilled], None]
    ) -> None:
        """`members()` gives the processes that run now; `report` gets what was injected."""
        self._members = members
        self._clock = clock
        self._report = report
        self._nodes = NodeFaults(members, clock=clock, report=report)
        self._armed: list[Drill] = []
        self._task: asyncio.Task[None] | None = None

    def arm(self, drill: Drill) -> None:
        """Inject `drill` as soon as its rank is at its step (at once if it is further, or the step is -1)."""
        if DRILLS[drill.fault].by == "node":
            self._nodes.arm(drill)
            return
        self._armed.append(drill)
        if self._task is None or self._task.done():
            self._task = background(self._watch())

    def close(self) -> None:
        """Forget what is armed."""
        self._nodes.close()
        self._armed.clear()

    async def _watch(self) -> None:
        while self._armed:
            for drill in tuple(self._armed):
                if (member := self._due(drill)) is not None:
                    self._armed.remove(drill)
                    self._inject(drill, member)
            await asyncio.sleep(_POLL_S)

    def _due(self, drill: Drill) -> MemberProcess | None:
        """The process to act on now. What the process does itself it is told early; it waits for its step."""
        told = DRILLS[drill.fault].by == "member"
        for member in self._members():
            if member.rank != drill.rank:
                continue
            if drill.step < 0 and not told:
                return member
            if member.protected and (told or member.ring.step() >= drill.step):
                return member
        return None

    def _inject(self, drill: Drill, member: MemberProcess) -> None:
        if DRILLS[drill.fault].by == "member":
            member.tell(drill)
            return
        step = member.ring.step()
        at = self._clock.wall()
        member.process.send(signal.SIGCONT if drill.stop else _SIGNALS[drill.fault])
        self._report(Drilled(drill.fault, drill.rank, step, at, ended=drill.stop))
