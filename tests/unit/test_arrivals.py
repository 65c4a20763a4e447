"""Starts of ranks as facts tell them, and findings that need no analysis."""

from __future__ import annotations

from keepstep.records.events import Suspect
from keepstep.records.messages import Address, Hello, MemberExited, MemberStarted, MemberStopped
from keepstep.records.watch_messages import MemberHung
from keepstep.service.analysis_process import Analysis
from keepstep.service.analysis_wire import Begin, Look
from keepstep.service.arrivals import Arrivals, judged
from keepstep.service.loss_findings import ended_by_signal, stands_still


def hello(rank: int, *, world: int = 3, version: str = "1.0") -> Hello:
    address = Address(f"m{rank}", "n0", "", "127.0.0.1", 1)
    return Hello(f"m{rank}", rank, world, 1, address, version, "2")


def started(world: int = 3) -> Arrivals:
    arrivals = Arrivals(world)
    for rank in range(world):
        assert arrivals.note(MemberStarted(f"m{rank}", rank, "n0", 1), node="n0", member="", now=100.0) == []
    return arrivals


def test_a_rank_of_another_version_is_named_at_its_hello() -> None:
    arrivals = started()
    assert arrivals.note(hello(0), node="n0", member="m0", now=101.0) == []
    assert arrivals.note(hello(1), node="n0", member="m1", now=101.0) == []
    (standing,) = arrivals.note(hello(2, version="0.9"), node="n0", member="m2", now=102.0)
    assert standing.finding.kind == "startup_disagrees"
    assert standing.finding.suspects == ((Suspect(rank=2),),)


def test_a_rank_that_never_comes_is_judged_by_what_the_others_needed() -> None:
    arrivals = started()
    for rank in (0, 1):
        arrivals.note(hello(rank), node="n0", member=f"m{rank}", now=102.0)
    notes = arrivals.notes("starting")
    assert judged(notes, 3, now=103.0) == {}
    (finding,) = judged(notes, 3, now=130.0).values()
    assert (finding.kind, finding.suspects) == ("startup_never_arrived", ((Suspect(rank=2),),))


def test_a_late_rank_that_comes_is_no_finding_any_more_and_is_told_again_in_the_next_attempt() -> None:
    analysis = Analysis(Begin("j", 3))
    arrivals = started()
    for rank in (0, 1):
        arrivals.note(hello(rank), node="n0", member=f"m{rank}", now=102.0)
    notes = arrivals.notes("starting")
    said = [analysis.look(Look(now, arrivals=notes)).changes for now in (130.0, 131.0)]
    assert [(one.status, one.finding.kind) for one in said[0]] == [("new", "startup_never_arrived")] and said[1] == ()
    arrivals.note(hello(2), node="n0", member="m2", now=132.0)
    (gone,) = analysis.look(Look(132.0, arrivals=arrivals.notes("starting"))).changes
    assert (gone.status, gone.finding.suspects) == ("ended", ((Suspect(rank=2),),))
    assert analysis.look(Look(133.0, arrivals=notes)).changes[0].status == "new"
    assert analysis.look(Look(134.0)).changes == ()
    assert analysis.look(Look(135.0, arrivals=notes)).changes[0].status == "new"


def test_the_first_rank_of_another_version_than_the_controller_is_named_alone() -> None:
    arrivals = Arrivals(2, "2.0")
    arrivals.note(MemberStarted("m0", 0, "n0", 1), node="n0", member="", now=100.0)
    (standing,) = arrivals.note(hello(0), node="n0", member="m0", now=101.0)
    assert standing.finding.suspects == ((Suspect(rank=0),),) and "the controller 2.0" in standing.finding.evidence[0]


def test_a_script_that_never_joins_is_not_judged_and_a_running_job_is_over_with() -> None:
    arrivals = started()
    assert arrivals.notes("starting") == ()
    arrivals.note(hello(0), node="n0", member="m0", now=101.0)
    assert len(arrivals.notes("starting")) == 3
    assert arrivals.notes("running") == ()


def test_a_process_that_dies_before_it_joins() -> None:
    arrivals = started()
    arrivals.note(hello(0), node="n0", member="m0", now=101.0)
    arrivals.note(MemberExited("m1", 1, 0, 9), node="n0", member="m1", now=101.0)
    kinds = {f.kind for f in judged(arrivals.notes("starting"), 3, now=102.0).values()}
    assert kinds == {"startup_died"}


def test_a_process_that_is_ended_with_its_job_did_not_die_of_itself() -> None:
    arrivals = started()
    for rank in (0, 1):
        arrivals.note(hello(rank), node="n0", member=f"m{rank}", now=102.0)
    arrivals.note(MemberExited("m2", 2, 0, 15), node="n0", member="m2", now=130.0, ordered=True)
    (finding,) = judged(arrivals.notes("ending"), 3, now=131.0).values()
    assert (finding.kind, finding.suspects) == ("startup_never_arrived", ((Suspect(rank=2),),))


def test_losses_that_need_no_analysis() -> None:
    stopped = stands_still("n1", MemberStopped("m4", 2, 1.0))
    assert (stopped.kind, stopped.layer, stopped.suspects) == (
        "noncommunication_hang",
        "host_cpu",
        ((Suspect(rank=2),),),
    )
    assert stands_still("n1", MemberHung("m4", 2, 1.0)).layer == "undetermined"
    killed = ended_by_signal("n1", MemberExited("m4", 2, 137, 9))
    assert (killed.kind, killed.layer, killed.node) == ("crash", "undetermined", "n1")
    assert "SIGKILL" in killed.evidence[0] and "n1" in killed.next_probe
    assert ended_by_signal("n1", MemberExited("m4", 2, 139, 11)).layer == "application"
