"""The thin shell around the job machine: facts in, journal, orders out. All deciding is in `control.job.decide`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Decision, Directed, JobSpec, StopRequest, Tick
from keepstep.control.job_state import Event as Input
from keepstep.control.roster import by_rank
from keepstep.errors import UsageError
from keepstep.records.events import DrillRecord, Event, FactRecord, OrderRecord
from keepstep.records.messages import Drill, Drilled, Fact
from keepstep.service.clock import Clock
from keepstep.service.keeper import Keeper
from keepstep.service.leadership import Leadership

__all__ = ["FAULTS", "TICK_S", "JobShell"]

TICK_S = 0.1
FAULTS = ("kill", "freeze")
_log = logging.getLogger(__name__)


class JobShell:
    """One job. `done` is set when everything has ended; then `state.exit_code` is the job's.

    `steps()` says which step ranks are in, as far as that is known here.
    """

    def __init__(
        self, spec: JobSpec, send: Callable[[Directed], None], *, keeper: Keeper, clock: Clock, leadership: Leadership
    ) -> None:
        """`send` delivers an order to an agent (and through it to a member) without waiting."""
        self.state = new_job(spec, leadership.epoch)
        self._leadership = leadership
        self.done = asyncio.Event()
        self.steps: Callable[[], Mapping[int, int]] = dict
        self._send = send
        self._keeper = keeper
        self._clock = clock
        self._waiting: deque[Input] = deque()
        self._busy = False
        self._asked: list[Drill] = []

    def feed(self, fact: Fact | Tick | StopRequest, *, node: str = "", member: str = "") -> None:
        """Take one fact. Facts that orders lead to at once (an embedded agent answers directly) wait their turn."""
        if isinstance(fact, Drilled):
            self._note_drill(node, fact)
            return
        self._waiting.append(Input(node, member, fact))
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._turn(self._waiting.popleft())
        finally:
            self._busy = False

    def drill(self, fault: str, *, rank: int, step: int) -> str:
        """Order a fault for `rank` at `step` (-1: now); returns what will happen. Raises UsageError for nonsense."""
        world = self.state.spec.world
        if fault not in FAULTS:
            raise UsageError(f"no such drill: {fault}", remedy=f"one of {', '.join(FAULTS)}")
        if not 0 <= rank < world:
            raise UsageError(f"no rank {rank} in a job of {world}", remedy=f"ranks are 0 to {world - 1}")
        if step < -1:
            raise UsageError(f"no step {step}", remedy="steps count from 0")
        if self.state.exit_code is not None or self.done.is_set():
            raise UsageError("the job is ending", remedy="drills need a running job")
        holder = by_rank(self.state.members).get(rank)
        if holder is None:
            raise UsageError(f"nobody holds rank {rank} at the moment", remedy="try again in a moment")
        order = Drill(self.state.epoch, fault, rank, step)
        at = self.steps().get(rank, holder.version)
        self._asked.append(order)
        directed = Directed(holder.node, "", order, "a person asked for it")
        self._keeper.keep(self._order_record(directed, self._clock.wall()), durable=True)
        self._send(directed)
        if 0 <= step <= at and at > 0:
            return f"{fault} of rank {rank} at once: it is in step {at}" + (f", past step {step}" if at > step else "")
        return _planned(order)

    def waiting_drills(self) -> list[str]:
        """What was asked for and has not happened."""
        return [_planned(order) for order in self._asked]

    async def tick(self) -> None:
        """Tell the machine that time passes, until the job is done."""
        while not self.done.is_set():
            self._leadership.renew()
            self.feed(Tick())
            await asyncio.sleep(TICK_S)

    def _turn(self, event: Input) -> None:
        now = self._clock.wall()
        if not isinstance(event.fact, Tick | StopRequest):
            self._keeper.keep(
                FactRecord(
                    job=self.state.spec.job,
                    node=event.source_node,
                    member=event.source_member,
                    wall=now,
                    fact=event.fact,
                )
            )
        before = self.state.phase
        decision = decide(self.state, event, now=now)
        self.state = decision.state
        self._leadership.note(decision.state)
        self._record(decision, now)
        for directed in decision.orders:
            self._send(directed)
        if decision.reason:
            quiet = before in ("gathering", "restarting")
            _log.log(logging.DEBUG if quiet else logging.INFO, "%s", decision.reason)
        if self.state.phase == "done":
            self.done.set()

    def _record(self, decision: Decision, now: float) -> None:
        """Journal what was decided; on the disk before any order of it goes out."""
        orders = [self._order_record(directed, now) for directed in decision.orders]
        events: list[Event] = [*decision.findings, *decision.incidents, *orders]
        for number, event in enumerate(events, 1):
            self._keeper.keep(event, durable=number == len(events))

    def _order_record(self, directed: Directed, now: float) -> OrderRecord:
        return OrderRecord(
            job=self.state.spec.job,
            attempt=self.state.attempt,
            generation=self.state.generation,
            node=directed.node,
            wall=now,
            order=directed.order,
            epoch=directed.order.epoch,
            target=directed.member or directed.node,
            reason=directed.reason,
        )

    def _note_drill(self, node: str, fact: Drilled) -> None:
        same = [d for d in self._asked if (d.fault, d.rank) == (fact.fault, fact.rank) and d.step <= fact.step]
        asked = min(same, key=lambda d: d.step, default=None)
        if asked is not None:
            self._asked.remove(asked)
        record = DrillRecord(
            job=self.state.spec.job,
            node=node,
            rank=fact.rank,
            step=fact.step,
            wall=fact.at,
            fault=fact.fault,
            requested_step=asked.step if asked else None,
        )
        self._keeper.keep(record, durable=True)
        _log.info("drill: %s of rank %d in step %d", fact.fault, fact.rank, fact.step)


def _planned(order: Drill) -> str:
    when = "now" if order.step < 0 else f"when it reaches step {order.step}"
    return f"{order.fault} of rank {order.rank} {when}"
