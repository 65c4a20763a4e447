"""The thin shell around the job machine: facts in, journal, orders out. All deciding is in `control.job.decide`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from keepstep.control.drilling import drill_words, plan_drill
from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Decision, Directed, JobSpec, StopRequest, TakeOver, Tick
from keepstep.control.job_state import Event as Input
from keepstep.control.move_plan import plan_move, plan_words
from keepstep.control.roster import by_rank
from keepstep.errors import MoveNotMade, UsageError
from keepstep.records.drills import DRILLS, DrillRequest
from keepstep.records.events import DrillRecord, Event, LeaderRecord
from keepstep.records.messages import Drill, Drilled, Fact, StartMember
from keepstep.records.move_words import move_words
from keepstep.records.moves import MoveRecord, MoveRequest
from keepstep.service.clock import Clock
from keepstep.service.keeper import Keeper
from keepstep.service.leadership import Leadership
from keepstep.service.outbox import Outboxes
from keepstep.service.replaying import Replayed, acted, event_record, order_record

__all__ = ["TICK_S", "JobShell", "Watcher"]

TICK_S = 0.1
_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Whoever looks at facts before the job machine does."""

    def __call__(self, fact: Fact, *, node: str, member: str) -> bool:
        """Take a look at `fact`; True if it is not for the machine."""


class JobShell:
    """One job. `done` is set when everything has ended; then `state.exit_code` is the job's.

    `steps()` says which step ranks are in, as far as that is known here. `start_drills` are faults by rank that the
    first process of the rank is started with. `watcher` sees every fact first, and says whether
    it was its own business.
    """

    def __init__(
        self,
        spec: JobSpec,
        send: Callable[[Directed], None],
        *,
        keeper: Keeper,
        clock: Clock,
        leadership: Leadership,
        replayed: Replayed | None = None,
    ) -> None:
        """`send` delivers an order to an agent (and through it to a member) without waiting.

        `replayed` is the job as an earlier controller left it; facts then wait until `lead`."""
        self.state = replayed.state if replayed is not None else new_job(spec, leadership.epoch)
        self.heard: dict[str, int] = dict(replayed.heard) if replayed is not None else {}
        self.sent = replayed.sent if replayed is not None else Outboxes()
        self._leadership = leadership
        self.done = asyncio.Event()
        self.steps: Callable[[], Mapping[int, int]] = dict
        self.start_drills: dict[int, str] = {}
        self.watcher: Watcher | None = None
        self._send = send
        self._keeper = keeper
        self._clock = clock
        self._waiting: deque[tuple[Input, int]] = deque()
        self._busy = replayed is not None
        self._untold = replayed.untold if replayed is not None else None
        self._asked: list[Drill] = []
        self._begun: list[tuple[str, Drill]] = []
        self._taken_over = replayed is not None
        self._moves: dict[int, asyncio.Future[MoveRecord]] = {}

    def lead(self) -> None:
        """Begin to lead: a new job, or one that an earlier controller left, perhaps in the middle of a turn."""
        epoch, now = self._leadership.epoch, self._clock.wall()
        if self._untold is None:
            self._keeper.keep(LeaderRecord(job=self.state.spec.job, wall=now, epoch=epoch), durable=True)
            return
        self._carry_out(self._untold, now=now)
        self._waiting.appendleft((Input("", "", TakeOver(epoch)), 0))
        self._take_turns()

    def feed(
        self,
        fact: Fact | Tick | StopRequest | TakeOver | MoveRequest,
        *,
        node: str = "",
        member: str = "",
        number: int = 0,
    ) -> None:
        """Take one fact. Facts that orders lead to at once (an embedded agent answers directly) wait their turn; a
        numbered one that was heard before is dropped."""
        if number:
            if number <= self.heard.get(node, 0):
                return
            self.heard[node] = number
        if isinstance(fact, Drilled):
            self._note_drill(node, fact, number=number)
            return
        if self.watcher is not None and isinstance(fact, Fact) and self.watcher(fact, node=node, member=member):
            return
        self._waiting.append((Input(node, member, fact), number))
        if not self._busy:
            self._take_turns()

    def _take_turns(self) -> None:
        self._busy = True
        try:
            while self._waiting:
                self._turn(*self._waiting.popleft())
        finally:
            self._busy = False

    def drill(self, request: DrillRequest) -> str:
        """Order a fault; returns what will happen. Raises UsageError for nonsense."""
        if self.done.is_set():
            raise UsageError("the job is ending", remedy="drills need a running job")
        planned = plan_drill(self.state, request)
        if request.stop and DRILLS[request.fault].by != "node" and not any(map(self._goes_on, planned)):
            what = f"there is no {request.fault} to end: none goes on or waits for its step"
            raise UsageError(what, remedy="leave --stop out to begin one")
        for directed in planned:
            assert isinstance(directed.order, Drill)
            self._asked.append(directed.order)
            self.order(directed)
        return "; ".join(self._promise(directed.order) for directed in planned if isinstance(directed.order, Drill))

    async def move(self, request: MoveRequest) -> str:
        """Move ranks; returns what will happen, or with `wait` how it went.

        Raises UsageError for nonsense and, with `wait`, MoveNotMade.
        """
        heirs = plan_move(self.state, request)
        number = self.state.moves + 1
        self._moves[number] = ended = asyncio.get_running_loop().create_future()
        self.feed(request)
        if not request.wait:
            return plan_words(number, heirs)
        record = await ended
        if record.outcome != "made":
            raise MoveNotMade(move_words(record))
        return move_words(record)

    def order(self, directed: Directed) -> None:
        """Give an order that the machine did not decide on (a drill, a question): journal, then on its way."""
        directed = self.sent.numbered(directed)
        self._keeper.keep(order_record(directed, self.state, now=self._clock.wall()), durable=True)
        self._send(directed)

    def pass_on(self, directed: Directed) -> None:
        """Send a question that comes often and changes nothing: it is not kept in the journal."""
        self._send(directed)

    def _promise(self, order: Drill) -> str:
        """What `order` will do, and whether its step is past."""
        holder = by_rank(self.state.members).get(order.rank)
        at = self.steps().get(order.rank, holder.version if holder is not None else 0)
        if 0 <= order.step <= at and at > 0:
            what = drill_words(msgspec.structs.replace(order, step=-1)).replace(" now", " at once", 1)
            return f"{what}: it is in step {at}" + (f", past step {order.step}" if at > order.step else "")
        return drill_words(order)

    def _goes_on(self, end: Directed) -> bool:
        """Whether a drill that `end` ends is not over. What was asked of an earlier controller is not known here."""
        assert isinstance(end.order, Drill)
        here = [drill for member, drill in self._begun if end.member in ("", member)]
        return self._taken_over or any(_ends(end.order, drill) for drill in (*self._asked, *here))

    def waiting_drills(self) -> list[str]:
        """What was asked for and has not happened."""
        return [drill_words(order) for order in self._asked]

    async def tick(self) -> None:
        """Tell the machine that time passes, until the job is done."""
        while not self.done.is_set():
            self._leadership.renew()
            self.feed(Tick())
            await asyncio.sleep(TICK_S)

    def _turn(self, event: Input, number: int) -> None:
        now = self._clock.wall()
        before = self.state
        if not isinstance(event.fact, Tick):
            self._keeper.keep(event_record(event, job=before.spec.job, now=now, number=number))
        decision = decide(before, event, now=now)
        if isinstance(event.fact, Tick) and acted(before, decision):
            self._keeper.keep(event_record(event, job=before.spec.job, now=now))
        self.state = decision.state
        self._leadership.note(decision.state)
        self._carry_out(decision, now=now)
        for record in decision.moves:
            ended = self._moves.pop(record.number, None)
            if ended is not None and not ended.done():
                ended.set_result(record)
        if decision.reason:
            quiet = before.phase in ("gathering", "restarting")
            _log.log(logging.DEBUG if quiet else logging.INFO, "%s", decision.reason)
        if self.state.phase == "done":
            self.done.set()

    def _carry_out(self, decision: Decision, *, now: float) -> None:
        """Journal what was decided, on the disk before any order of it goes out; then send the orders."""
        orders = [self.sent.numbered(directed) for directed in decision.orders]
        given = [order_record(directed, self.state, now=now) for directed in orders]
        events: list[Event] = [*decision.findings, *decision.incidents, *decision.moves, *given]
        for count, event in enumerate(events, 1):
            self._keeper.keep(event, durable=count == len(events))
        for directed in orders:
            self._deliver(directed)

    def _note_drill(self, node: str, fact: Drilled, *, number: int) -> None:
        """Journal what an agent or a member did, with what it was asked."""
        same = [
            drill
            for drill in self._asked
            if (drill.fault, drill.rank, drill.stop) == (fact.fault, fact.rank, fact.ended) and drill.step <= fact.step
        ]
        asked = min(same, key=lambda drill: drill.step, default=None)
        if asked is not None:
            at = self._asked.index(asked)
            self._asked[: at + 1] = [drill for drill in self._asked[:at] if not _ends(asked, drill)]
        self._note_begun(fact, asked)
        record = DrillRecord(
            job=self.state.spec.job,
            node=node,
            rank=fact.rank,
            step=fact.step,
            wall=fact.at,
            fault=fact.fault,
            requested_step=asked.step if asked else None,
            ended=fact.ended,
            peers=asked.peers if asked else (),
            factor=asked.factor or None if asked else None,
            rate=asked.rate or None if asked else None,
            note=fact.note,
            number=number,
        )
        self._keeper.keep(record, durable=True)
        _log.info(
            "drill: %s%s of rank %d in step %d", "end of " if fact.ended else "", fact.fault, fact.rank, fact.step
        )

    def _note_begun(self, fact: Drilled, asked: Drill | None) -> None:
        """Which faults go on, with the member that has each; one that ends is the first of its kind."""
        alike = [one for one in self._begun if (one[1].fault, one[1].rank) == (fact.fault, fact.rank)]
        if fact.ended and alike:
            self._begun.remove(alike[0])
        elif not fact.ended and asked is not None and (holder := by_rank(self.state.members).get(fact.rank)):
            self._begun.append((holder.name, asked))

    def _deliver(self, directed: Directed) -> None:
        """Send an order on its way; the first start of a rank may be drilled."""
        order = directed.order
        if isinstance(order, StartMember) and order.attempt == 0 and order.rank in self.start_drills:
            order = msgspec.structs.replace(order, drill=self.start_drills.pop(order.rank))
            directed = msgspec.structs.replace(directed, order=order)
        self._send(directed)


def _ends(stop: Drill, drill: Drill) -> bool:
    """Whether `stop` is the end of `drill`: of the same fault, of links to some of the same ranks."""
    same = (drill.fault, drill.rank) == (stop.fault, stop.rank)
    linked = drill.peers == stop.peers or not set(drill.peers).isdisjoint(stop.peers)
    return stop.stop and not drill.stop and same and linked
