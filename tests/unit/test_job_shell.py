"""The shell around the job machine: everything is journalled before it is sent, and drills are checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.control.job_state import Directed, JobSpec, StopRequest
from keepstep.errors import StoreError, UsageError
from keepstep.records.drills import DrillRequest
from keepstep.records.events import DrillRecord, Event, FactRecord, OrderRecord
from keepstep.records.messages import AgentHello, Drill, Drilled, MemberExited, StartMember
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.leadership import Leadership
from keepstep.store.journal import MemoryJournal
from keepstep.store.state_store import MemoryStateStore

SPEC = JobSpec(job="j", world=2, nnodes=1, keepstep_version="1", secret=b"s" * 32, max_restarts=1)
HELLO = AgentHello("n1", 2, 0, "1")


class StandingClock:
    """A clock that says what it was told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class FullJournal(MemoryJournal):
    """A journal whose disk fills up after `room` records."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def append(self, event: Event, *, durable: bool = False) -> None:
        if self.room <= 0:
            raise StoreError("no space left on device")
        self.room -= 1
        super().append(event, durable=durable)


def leading(job: str, clock: StandingClock) -> Leadership:
    """The right to lead a job in a store of this process."""
    return Leadership(MemoryStateStore(), job, holder="test", clock=clock)


def shell_with(journal: MemoryJournal, send: Callable[[Directed], None]) -> tuple[JobShell, Keeper]:
    keeper = Keeper(journal)
    clock = StandingClock()
    return JobShell(SPEC, send, keeper=keeper, clock=clock, leadership=leading(SPEC.job, clock)), keeper


def started() -> tuple[JobShell, MemoryJournal, list[Directed]]:
    sent: list[Directed] = []
    journal = MemoryJournal()
    shell, _ = shell_with(journal, sent.append)
    shell.feed(HELLO, node="n1")
    return shell, journal, sent


def ended(shell: JobShell, sent: list[Directed], code: int) -> None:
    for order in [d.order for d in sent if isinstance(d.order, StartMember)]:
        fact = MemberExited(order.member, order.rank, code, 0, protected=False)
        shell.feed(fact, node="n1", member=order.member)


def test_orders_are_in_the_journal_before_they_are_sent():
    journal = MemoryJournal()
    known: list[bool] = []

    def send(directed: Directed) -> None:
        orders = [event.order for event in journal.replay() if isinstance(event, OrderRecord)]
        known.append(directed.order in orders)

    shell, _ = shell_with(journal, send)
    shell.feed(HELLO, node="n1")
    assert known == [True, True]
    assert [event.fact for event in journal.replay() if isinstance(event, FactRecord)] == [HELLO]


def test_an_answer_given_while_orders_go_out_waits_its_turn():
    phases: list[str] = []

    def send(directed: Directed) -> None:
        phases.append(shell.state.phase)
        if isinstance(directed.order, StartMember):
            fact = MemberExited(directed.order.member, directed.order.rank, 0, 0, protected=False)
            shell.feed(fact, node="n1", member=directed.order.member)

    shell, _ = shell_with(MemoryJournal(), send)
    shell.feed(HELLO, node="n1")
    assert phases == ["starting", "starting"] and shell.done.is_set() and shell.state.exit_code == 0


def test_the_job_is_done_when_all_have_ended():
    shell, _, sent = started()
    assert not shell.done.is_set()
    ended(shell, sent, 0)
    assert shell.done.is_set() and shell.state.exit_code == 0


def test_a_request_to_stop_sets_the_exit_code():
    shell, _, sent = started()
    shell.feed(StopRequest(130, "stopped by SIGINT"))
    ended(shell, sent, 0)
    assert shell.done.is_set() and shell.state.exit_code == 130


@pytest.mark.parametrize(
    ("fault", "rank", "step", "says"),
    [("kill", 2, -1, "no rank 2"), ("kill", -1, -1, "no rank -1"), ("kill", 0, -2, "no step"), ("melt", 0, 1, "melt")],
)
def test_nonsense_drills_are_refused(fault, rank, step, says):
    shell, _, sent = started()
    before = list(sent)
    with pytest.raises(UsageError, match=says):
        shell.drill(DrillRequest(fault, rank, step))
    assert sent == before


def test_a_drill_goes_to_the_node_of_its_rank_and_is_recorded_when_done():
    shell, journal, sent = started()
    assert "step 30" in shell.drill(DrillRequest("kill", 1, 30))
    assert (sent[-1].node, sent[-1].order) == ("n1", Drill(1, "kill", 1, 30))
    shell.feed(Drilled("kill", 1, 31, 1234.5), node="n1")
    (record,) = [event for event in journal.replay() if isinstance(event, DrillRecord)]
    assert (record.rank, record.step, record.requested_step, record.wall) == (1, 31, 30, 1234.5)


def test_a_start_drill_goes_with_the_first_start_of_its_rank_only():
    sent: list[Directed] = []
    journal = MemoryJournal()
    shell, _ = shell_with(journal, sent.append)
    shell.start_drills = {1: "never-start"}
    shell.feed(HELLO, node="n1")
    starts = [d.order for d in sent if isinstance(d.order, StartMember)]
    assert [(order.rank, order.drill) for order in starts] == [(0, ""), (1, "never-start")]
    shell.feed(Drilled("never-start", 1, -1, 7.0), node="n1")
    shell.feed(MemberExited(starts[0].member, 0, 1, 0, protected=False), node="n1", member=starts[0].member)
    shell.feed(MemberExited(starts[1].member, 1, 1, 0, protected=False), node="n1", member=starts[1].member)
    again = [d.order for d in sent if isinstance(d.order, StartMember)][2:]
    assert [(order.rank, order.attempt, order.drill) for order in again] == [(0, 1, ""), (1, 1, "")]


def test_the_end_of_a_drill_is_recorded_with_what_was_asked():
    shell, journal, sent = started()
    shell.drill(DrillRequest("cut-link", source=0, destination=1))
    shell.feed(Drilled("cut-link", 0, 5, 10.0, note="nothing passes"), node="n1")
    shell.drill(DrillRequest("cut-link", source=0, destination=1, stop=True))
    shell.feed(Drilled("cut-link", 0, 5, 12.0, ended=True), node="n1")
    began, ended_ = [event for event in journal.replay() if isinstance(event, DrillRecord)]
    assert (began.peers, began.ended, began.note) == ((1,), False, "nothing passes")
    assert (ended_.peers, ended_.ended, ended_.wall) == ((1,), True, 12.0)
    assert shell.waiting_drills() == [] and sent[-1].member == "m0"


def test_the_end_of_a_drill_that_does_not_go_on_is_refused():
    shell, _, sent = started()
    stop = DrillRequest("slow-compute", 1, stop=True)
    for request in (DrillRequest("slow-compute", 1, 9, steps=2), DrillRequest("slow-compute", 1)):
        with pytest.raises(UsageError, match="no slow-compute to end"):
            shell.drill(stop)
        shell.drill(DrillRequest("slow-compute", 0))
        with pytest.raises(UsageError, match="no slow-compute to end"):
            shell.drill(stop)
        shell.drill(request)
        if request.step < 0:
            shell.feed(Drilled("slow-compute", 1, 5, 11.0), node="n1")
        assert shell.drill(stop) == "the end of slow-compute of rank 1" and sent[-1].order.stop
        shell.feed(Drilled("slow-compute", 1, 5, 12.0, ended=True), node="n1")
    assert shell.waiting_drills() == ["slow-compute of rank 0 now"] * 2


def test_a_link_drill_that_ended_by_itself_is_not_ended_again():
    shell, _, _ = started()
    shell.drill(DrillRequest("throttle-link", source=0, destination=1, rate=1e6, steps=5))
    shell.feed(Drilled("throttle-link", 0, 5, 10.0), node="n1")
    shell.feed(Drilled("throttle-link", 0, 10, 12.0, ended=True), node="n1")
    with pytest.raises(UsageError, match="no throttle-link to end"):
        shell.drill(DrillRequest("throttle-link", source=0, destination=1, stop=True))


def test_a_drill_whose_step_is_past_says_so_and_one_that_never_came_is_named():
    shell, _, _ = started()
    shell.steps = lambda: {0: 57, 1: 57}
    assert "at once" in (said := shell.drill(DrillRequest("kill", 0, 30))) and "past step 30" in said
    shell.drill(DrillRequest("kill", 0, 90))
    shell.drill(DrillRequest("freeze", 1, 60))
    shell.feed(Drilled("kill", 0, 57, 1234.5), node="n1")
    assert shell.waiting_drills() == [
        "kill of rank 0 when it reaches step 90",
        "freeze of rank 1 when it reaches step 60",
    ]


def test_a_drill_of_a_job_that_is_over_is_refused():
    shell, _, sent = started()
    ended(shell, sent, 0)
    with pytest.raises(UsageError, match="ending"):
        shell.drill(DrillRequest("kill", 0))


def test_a_full_disk_does_not_stop_the_job_but_is_told():
    sent: list[Directed] = []
    shell, keeper = shell_with(FullJournal(2), sent.append)
    assert keeper.problem is None
    shell.feed(HELLO, node="n1")
    ended(shell, sent, 0)
    assert shell.done.is_set() and shell.state.exit_code == 0
    assert keeper.problem is not None and "not in the journal" in str(keeper.problem)
