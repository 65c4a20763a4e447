"""G-23: a controller that dies inside a turn leaves a turn that the next one completes, with nothing twice."""

from __future__ import annotations

import contextlib

import pytest
from test_job_shell import SPEC, StandingClock

from keepstep.control.job_state import Directed
from keepstep.records.events import Event, OrderRecord
from keepstep.records.messages import AgentHello, Drill, Drilled, StartMember
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.leadership import Leadership
from keepstep.service.replaying import Replayed, replay
from keepstep.store.journal import MemoryJournal
from keepstep.store.state_store import MemoryStateStore

HELLO = AgentHello("n1", 2, 1, "1")
WHOLE = ["m0", "m1", "m2"]


class Killed(Exception):
    """SIGKILL, as far as a test can have it."""


class CutOff(MemoryJournal):
    """The journal of a controller that dies when it would write one record more than `room`."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def append(self, event: Event, *, durable: bool = False) -> None:
        self.spend()
        super().append(event, durable=durable)

    def spend(self) -> None:
        if not self.room:
            raise Killed
        self.room -= 1


class Controllers:
    """Controllers of one job, one after the other; `sent` is what the agent of n1 got, in order."""

    def __init__(self, room: int) -> None:
        self.journal = CutOff(room)
        self.sent: list[Directed] = []
        self._store, self._clock, self._count = MemoryStateStore(), StandingClock(), 0

    def send(self, directed: Directed) -> None:
        self.journal.spend()
        self.sent.append(directed)

    def next(self, replayed: Replayed | None = None) -> JobShell:
        """One more; the agent has come back to it as soon as it leads."""
        self._count += 1
        self._clock.now += 60.0
        right = Leadership(self._store, SPEC.job, holder=f"c{self._count}", clock=self._clock)
        send = self.send if replayed is None else lambda directed: None
        shell = JobShell(
            SPEC, send, keeper=Keeper(self.journal), clock=self._clock, leadership=right, replayed=replayed
        )
        shell.lead()
        for directed in shell.sent.after("n1", len(self.sent)):
            self.send(directed)
        return shell


@pytest.mark.parametrize("room", range(1, 8))
@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_turn_that_is_cut_off_anywhere_is_completed(room, again):
    """Leader, fact and three orders are written, then the orders are sent; a second death may cut off the repair."""
    run = Controllers(room)
    with contextlib.suppress(Killed):
        run.next().feed(HELLO, node="n1", number=1)
    if again:
        run.journal.room = again
        with contextlib.suppress(Killed):
            run.next(replay(run.journal.replay(), SPEC))
    run.journal.room = 100
    shell = run.next(replay(run.journal.replay(), SPEC))
    if not shell.heard:
        shell.feed(HELLO, node="n1", number=1)
        run.sent += shell.sent.after("n1", 0)
    starts = [directed.order.member for directed in run.sent if isinstance(directed.order, StartMember)]
    written = [event.order.member for event in run.journal.replay() if isinstance(event, OrderRecord)]
    assert starts == written == WHOLE and [directed.number for directed in run.sent] == [1, 2, 3]
    left = replay(run.journal.replay(), SPEC)
    assert left.untold.orders == () and left.state == shell.state and set(left.state.members) == set(WHOLE)


def test_orders_that_nobody_decided_on_do_not_stand_for_others():
    """A person's drill lies behind the fact in the journal, too."""
    run = Controllers(3)
    with pytest.raises(Killed):
        run.next().feed(HELLO, node="n1", number=1)
    run.journal.room = 100
    other = Directed("n1", "", Drill(1, "kill", 0, -1), "a person asked for it", 2)
    run.journal.append(OrderRecord(job="j", node="n1", order=other.order, reason=other.reason, number=other.number))
    assert [d.order.member for d in replay(run.journal.replay(), SPEC).untold.orders] == WHOLE[1:]


def test_facts_wait_until_the_next_controller_leads():
    run = Controllers(100)
    run.next()
    replayed = replay(run.journal.replay(), SPEC)
    right = Leadership(MemoryStateStore(), SPEC.job, holder="later", clock=StandingClock())
    shell = JobShell(
        SPEC, run.send, keeper=Keeper(run.journal), clock=StandingClock(), leadership=right, replayed=replayed
    )
    shell.feed(HELLO, node="n1", number=1)
    assert shell.state.phase == "gathering" and run.sent == []
    shell.lead()
    assert shell.state.phase == "starting" and len(run.sent) == len(WHOLE)


def test_what_a_drill_did_is_heard_once():
    run = Controllers(100)
    run.next().feed(Drilled("kill", 1, 31, 1234.5), node="n1", number=4)
    assert replay(run.journal.replay(), SPEC).heard == {"n1": 4}
