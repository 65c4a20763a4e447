"""The origin of a hang over nested groups, on small jobs run to a standstill."""

from __future__ import annotations

import pytest
from hang_world import Job, Layout
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.diagnosis.wavefront import diagnose_hang
from keepstep.records.evidence import GroupProgress, Place, Position, Reporter, Signature, Transfer


def named(finding):
    return [[suspect.rank for suspect in group] for group in finding.suspects]


def test_a_finished_job_has_no_finding():
    assert diagnose_hang(*Job(Layout(2, 2, 2)).stand_still()) == ()


@given(
    layout=st.builds(Layout, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)).filter(lambda one: one.world > 2),
    ahead=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_rank_that_stops_queueing_is_the_only_origin(layout, ahead, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    job = Job(layout, ahead=ahead)
    job.stops_queueing[rank] = data.draw(st.integers(0, len(job.program(rank)) - 1))
    findings = diagnose_hang(*job.stand_still())
    blamed = {name for finding in findings for group in named(finding) for name in group}
    if [finding.kind for finding in findings] == ["collective_mismatch"]:
        return  # one member is ahead of all others: one call too many would look the same
    assert blamed == {rank}
    assert findings[0].kind == "noncommunication_hang"
    assert rank not in findings[0].victims


@given(
    layout=st.builds(Layout, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)).filter(lambda one: one.world > 2),
    ahead=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_device_that_stops_is_in_the_only_set(layout, ahead, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    job = Job(layout, ahead=ahead)
    job.device_stops[rank] = data.draw(st.integers(0, len(job.program(rank)) - 1))
    findings = diagnose_hang(*job.stand_still())
    assert len(findings) == 1
    finding = findings[0]
    assert finding.kind == "communication_hang"
    (group,) = finding.suspects
    assert rank in {suspect.rank for suspect in group} | {
        end for suspect in group for end in (suspect.source, suspect.destination)
    }


@given(ahead=st.integers(1, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_two_independent_faults_are_two_findings(ahead, data):
    layout = Layout(2, 1, 4)
    first = data.draw(st.integers(0, layout.world - 1))
    second = data.draw(st.integers(0, layout.world - 1).filter(lambda rank: rank // 2 != first // 2))
    job = Job(layout, ahead=ahead)
    stop = data.draw(st.integers(0, 2))  # both before the first collective that the two groups share
    job.stops_queueing = {first: stop, second: stop}
    findings = diagnose_hang(*job.stand_still())
    assert sorted(name for finding in findings for group in named(finding) for name in group) == sorted([first, second])
    assert len(findings) == 2


def test_reports_are_read_in_any_order_and_twice():
    job = Job(Layout(2, 2, 2))
    job.stops_queueing[5] = 7
    groups, transfers = job.stand_still()
    again = diagnose_hang([*reversed(groups), *groups], reversed(transfers))
    assert {named(finding)[0][0] for finding in again} == {5}


def group(name, ranks, *positions, **rest):
    return GroupProgress(group=name, ranks=ranks, positions=positions, **rest)


def at(rank, queued, finished, since=None, **rest):
    return Position(rank=rank, queued=queued, finished=finished, waiting_since=since, **rest)


def test_a_rank_without_any_report_is_silent():
    groups = [group("0", (0, 1, 2, 3), at(0, 5, 4), at(1, 5, 4), at(3, 5, 4))]
    (finding,) = diagnose_hang(groups, reporters=[Reporter(state="absent", rank=2, detail="no file")])
    assert (finding.kind, named(finding), finding.victims) == ("reporter_silent", [[2]], (0, 1, 3))
    assert any("no file" in line for line in finding.evidence)


def test_most_of_the_reports_missing_is_no_verdict():
    (finding,) = diagnose_hang([group("0", tuple(range(8)), at(0, 5, 4))])
    assert finding.kind == "undetermined"
    assert finding.suspects == ()


def test_all_in_one_collective_cannot_be_told_apart():
    (finding,) = diagnose_hang([group("0", (0, 1, 2), at(0, 5, 4), at(1, 5, 4), at(2, 5, 4))])
    assert (finding.kind, named(finding)) == ("communication_hang", [[0, 1, 2]])


def test_a_transfer_posted_on_both_sides_is_source_destination_or_link():
    transfers = [Transfer(rank=0, source=0, destination=1), Transfer(rank=1, source=0, destination=1)]
    (finding,) = diagnose_hang([], transfers)
    (suspects,) = finding.suspects
    assert finding.kind == "communication_hang"
    assert {(one.source, one.destination, one.link) for one in suspects} == {
        (0, None, None),
        (None, 1, None),
        (None, None, (0, 1)),
    }


def test_a_device_that_fell_behind_its_peers_is_named():
    ends = [at(0, 9, 8, 1.0), at(1, 9, 8, 1.0), at(2, 9, 8, 1.0), at(3, 9, 5, 0.5)]
    findings = diagnose_hang([group("0", (0, 1, 2, 3), *ends)])
    assert [(finding.kind, finding.layer, named(finding)) for finding in findings] == [
        ("noncommunication_hang", "hardware_gpu", [[3]])
    ]


def test_waiting_for_each_other_in_two_groups_is_a_dead_lock():
    one = group("a", (0, 1), at(0, 3, 2, 1.0), at(1, 2, 2))
    two = group("b", (0, 1), at(0, 6, 6), at(1, 7, 6, 1.0))
    (finding,) = diagnose_hang([one, two])
    assert (finding.kind, finding.layer, named(finding)) == ("collective_mismatch", "application", [[0, 1]])


def test_one_rank_ahead_of_all_others_called_too_often():
    ends = [at(rank, 5, 5) for rank in range(7)] + [at(7, 6, 5)]
    (finding,) = diagnose_hang([group("0", tuple(range(8)), *ends)])
    assert (finding.kind, named(finding)) == ("collective_mismatch", [[7]])
    assert finding.confidence < 0.7


def test_a_whole_node_is_one_finding():
    ends = [at(rank, 5 if rank < 6 else 4, 4) for rank in range(8)]
    places = [Place(rank=rank, node=f"n{rank // 2}") for rank in range(8)]
    (finding,) = diagnose_hang([group("0", tuple(range(8)), *ends)], places=places)
    assert [[one.node for one in suspects] for suspects in finding.suspects] == [["n3"]]


def test_many_origins_single_nobody_out():
    ends = [at(rank, 5 if rank < 20 else 4, 4) for rank in range(40)]
    (finding,) = diagnose_hang([group("0", tuple(range(40)), *ends)])
    assert (finding.kind, finding.suspects) == ("undetermined", ())


@pytest.mark.parametrize(
    ("odd", "others"),
    [
        (Signature(op="all_gather"), Signature(op="all_reduce")),
        (Signature(op="all_reduce", sizes=((4,),)), Signature(op="all_reduce", sizes=((8,),))),
        (
            Signature(op="all_reduce", dtype="Half", sizes=((8,),)),
            Signature(op="all_reduce", dtype="Float", sizes=((8,),)),
        ),
        (Signature(op="broadcast", root=1), Signature(op="broadcast", root=0)),
    ],
)
def test_a_collective_that_differs_names_the_minority(odd, others):
    ends = [at(rank, 5, 4, signatures={5: odd if rank == 2 else others}) for rank in range(4)]
    (finding,) = diagnose_hang([group("0", (0, 1, 2, 3), *ends)])
    assert (finding.kind, named(finding), finding.sequence) == ("collective_mismatch", [[2]], 5)


def test_half_against_half_is_one_set():
    ends = [at(rank, 5, 4, signatures={5: Signature(op="broadcast" if rank < 1 else "barrier")}) for rank in range(2)]
    (finding,) = diagnose_hang([group("0", (0, 1), *ends)])
    assert named(finding) == [[0, 1]]


def test_sizes_of_all_to_all_may_differ():
    ends = [at(rank, 5, 5, signatures={5: Signature(op="all_to_all", sizes=((rank,),))}) for rank in range(4)]
    assert diagnose_hang([group("0", (0, 1, 2, 3), *ends)]) == ()


def test_another_fault_beside_a_mismatch_is_kept():
    wrong = [
        at(rank, 5, 4, signatures={5: Signature(op="all_gather" if rank == 0 else "all_reduce")}) for rank in range(3)
    ]
    hang = [at(4, 7, 6), at(5, 7, 6), at(6, 6, 6)]
    findings = diagnose_hang([group("a", (0, 1, 2), *wrong), group("b", (4, 5, 6), *hang)])
    assert {(finding.kind, named(finding)[0][0]) for finding in findings} == {
        ("collective_mismatch", 0),
        ("noncommunication_hang", 6),
    }


def test_a_counter_that_wrapped_is_ahead():
    top = (1 << 32) - 1
    ends = [at(0, 3, 2), at(1, 3, 2), at(2, top, top)]
    (finding,) = diagnose_hang([group("0", (0, 1, 2), *ends)])
    assert named(finding) == [[2]]


def test_a_moment_of_a_running_job_is_no_hang():
    ends = [Position(rank=rank, queued=100 if rank else 99) for rank in range(8)]
    assert diagnose_hang([group("0", tuple(range(8)), *ends, snapshot=True)]) == ()
    late = [Position(rank=rank, queued=100 if rank else 90) for rank in range(8)]
    (finding,) = diagnose_hang([group("0", tuple(range(8)), *late, snapshot=True)])
    assert named(finding) == [[0]]


def test_sixteen_thousand_ranks_in_four_kinds_of_groups():
    world, culprit = 16_384, 7_777
    groups = [group("world", tuple(range(world)), *(at(r, 4 if r == culprit else 5, 4, 9.0) for r in range(world)))]
    for name, size, stride in (("tp", 8, 1), ("pp", 16, 1024), ("ep", 64, 8)):
        seen = set()
        for first in range(world):
            members = tuple(first + stride * place for place in range(size))
            if first in seen or members[-1] >= world:
                continue
            seen.update(members)
            groups.append(group(f"{name}{first}", members, *(at(r, 9, 9) for r in members)))
    (finding,) = diagnose_hang(groups)
    assert named(finding) == [[culprit]]
    assert len(finding.victims) == world - 1


def test_silence_beside_a_fault_that_is_found_is_doubtful():
    groups = [group("0", (0, 1, 2, 3), at(0, 5, 4), at(1, 5, 4), at(3, 4, 4)), group("1", (1, 2), at(1, 7, 6))]
    findings = diagnose_hang([groups[0], GroupProgress(group="2", ranks=(0, 2), positions=(at(0, 9, 9),)), groups[1]])
    assert [(finding.kind, named(finding)) for finding in findings] == [
        ("noncommunication_hang", [[3]]),
        ("reporter_silent", [[2]]),
    ]
    assert findings[0].confidence > 0.7 > 0.5 > findings[1].confidence


def test_the_smallest_silent_sets_count_once():
    ends = [at(rank, 5, 4) for rank in range(6)]
    wide = group("w", tuple(range(8)), *ends)
    small = [group(name, (rank, 6), at(rank, 3, 2)) for rank, name in ((0, "a"), (1, "b"))]
    (finding,) = diagnose_hang([wide, *small])
    assert (finding.kind, named(finding)) == ("reporter_silent", [[6]])


def test_a_collective_that_some_have_just_finished_is_no_hang():
    ends = [at(0, 5, 5), at(1, 5, 4), at(2, 5, 4), at(3, 5, 4)]
    assert diagnose_hang([group("0", (0, 1, 2, 3), *ends)]) == ()
