"""Trials compared: ranks that fit give no finding; every single difference that is planted is found and named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trial_world_text import CALL_SITE, MadeWorld, exchange, records_of_a_step

from keepstep.diagnosis.trial_ranks import first_ranks, kind_of, more_ranks, peers_of
from keepstep.diagnosis.trial_verdict import memory_finding, node_memory, not_looked_at, trial_findings
from keepstep.errors import TornRecord
from keepstep.records.trial import (
    DataSeen,
    GroupAsked,
    Joined,
    MeshAsked,
    RankRead,
    StepsAsked,
    Trace,
    TrialEnded,
    WaitKept,
    decode_record,
    encode_record,
    trace_of,
)

calls = st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9]), st.integers(1, 1000))


@st.composite
def worlds(draw) -> MadeWorld:
    world = draw(st.sampled_from([4, 8, 12]))
    sizes = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=2, unique=True))
    program = draw(st.lists(calls, min_size=2, max_size=6))
    return MadeWorld(world, sizes, program, pairs=draw(st.booleans()))


def kinds(traces: list[Trace], world: int) -> list[str]:
    return [finding.kind for finding in trial_findings(traces, world)]


@given(worlds())
@settings(max_examples=25, deadline=None)
def test_ranks_that_fit_give_no_finding(made):
    assert trial_findings(made.all(), made.world) == []
    some = [trace for trace in made.all() if trace.rank in (0, 1, made.world - 1)]
    assert trial_findings(some, made.world) == []


CHANGES = {
    "another operation": ({"op": 4, "reduction": -1, "root": -1}, "calls_differ"),
    "another type": ({"element": 11}, "calls_differ"),
    "another reduction": ({"reduction": 3}, "calls_differ"),
    "another size": ({"sent": 20, "got": 20}, "sizes_differ"),
}


@given(worlds(), st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", CHANGES)
def test_one_call_that_differs_is_found_where_it_is(name, made, data):
    fields, kind = CHANGES[name]
    made = MadeWorld(made.world, made.sizes, [(0, 1, 7), *made.program], pairs=made.pairs)
    rank = data.draw(st.integers(0, made.world - 1))
    index = made.calls(rank)[0]
    (finding,) = trial_findings(made.change_call(rank, index, **fields), made.world)
    assert (finding.kind, finding.ranks) == (kind, (rank,))
    assert finding.sites == (f"job.py:{CALL_SITE}",)
    assert finding.remedy and "collective 0 of the group of the whole world (step 0)" in finding.what


@given(worlds(), st.data())
@settings(max_examples=25, deadline=None)
def test_a_call_that_is_missing_on_one_rank_is_found(made, data):
    rank = data.draw(st.integers(0, made.world - 1))
    index = data.draw(st.sampled_from(made.calls(rank)))
    found = trial_findings(made.drop_call(rank, index), made.world)
    assert found and all(one.kind in ("call_missing", "calls_differ", "sizes_differ") for one in found)
    assert any(rank in one.ranks or str(rank) in one.what for one in found)


@given(worlds(), st.data())
@settings(max_examples=25, deadline=None)
def test_a_group_that_one_rank_makes_otherwise_is_found(made, data):
    rank = data.draw(st.integers(0, made.world - 1))
    groups = list(made.traces[rank].groups)
    place = data.draw(st.integers(1, len(groups) - 1))
    groups[place] = replace(groups[place], ranks=(0, made.world - 1, 1))
    found = trial_findings(made.change(rank, groups=tuple(groups)), made.world)
    assert found[0].kind == "groups_disagree" and found[0].ranks == (rank,)
    assert f"group {place} is not the same" in found[0].what


@given(worlds(), st.data())
@settings(max_examples=25, deadline=None)
def test_a_group_that_one_rank_does_not_make_is_found(made, data):
    rank = data.draw(st.integers(0, made.world - 1))
    extra = GroupAsked((0, 1), True, False, "", 30)
    for other in range(made.world):
        if other != rank:
            made.change(other, groups=(*made.traces[other].groups, replace(extra, member=other < 2)))
    found = trial_findings(made.all(), made.world)
    assert [(one.kind, one.ranks, one.sites) for one in found] == [("group_not_made", (rank,), ("job.py:30",))]


@given(st.sampled_from([4, 8]), st.data())
@settings(max_examples=25, deadline=None)
def test_a_transfer_without_its_other_side_or_of_another_size_is_found(world, data):
    made = MadeWorld(world, [2], [(0, 1, 7)], pairs=True)
    rank = data.draw(st.integers(0, world - 1))
    index = data.draw(st.sampled_from(made.calls(rank, collective=False)))
    how = data.draw(st.sampled_from(["drop", "size", "tag"]))
    if how == "drop":
        made.drop_call(rank, index)
    elif how == "tag":
        made.change_call(rank, index, tag=5)
    else:
        made.change_call(rank, index, sent=128 * (rank % 2 == 0), got=128 * (rank % 2))
    pair = (rank - rank % 2, rank - rank % 2 + 1)
    found = trial_findings(made.all(), world)
    assert found[0].ranks == pair
    expected = {"drop": ("send_without_receive", "receive_without_send"), "size": ("transfer_differs",)}
    assert found[0].kind in expected.get(how, (*expected["drop"],))


def test_groups_taken_in_another_order_are_a_deadlock():
    made = MadeWorld(4, [2], [(0, 1, 7), (1, 1, 9)], pairs=False)
    events = made.traces[0].events
    crossed = (*events[2:4], *events[0:2], *events[4:])
    (finding,) = trial_findings(made.change(0, events=crossed), 4)
    assert finding.kind == "deadlock" and 0 in finding.ranks and 1 in finding.ranks
    later = (events[2], events[0], *(WaitKept(n) for n in (events[2].number, events[0].number)), *events[4:])
    assert kinds(made.change(0, events=later), 4) == []


def test_two_ranks_that_receive_before_they_send_wait_for_ever():
    made = MadeWorld(4, [2], [(0, 9, 1)], pairs=True)
    left, right = (made.traces[rank].events[-2] for rank in (0, 1))
    for rank, other, call in ((0, 1, left), (1, 0, right)):
        receive = replace(call, number=90, op=11, peer=other, sent=0, got=64)
        send = replace(call, number=91, op=10, peer=other, sent=64, got=0)
        made.change(rank, events=(receive, WaitKept(90), send, WaitKept(91)))
    for rank in (2, 3):
        made.change(rank, events=())
    (finding,) = trial_findings(made.all(), 4)
    assert finding.kind == "deadlock" and finding.ranks == (0, 1)


def test_sizes_that_come_from_data_are_not_compared():
    made = MadeWorld(4, [2], [(0, 1, 7)], pairs=False)
    for rank in range(4):
        events = made.traces[rank].events
        own = replace(events[0], sent=4 * (rank + 1))
        made.change(rank, events=(exchange(-1, 0, value=rank + 1), WaitKept(-1), own, *events[1:]))
    assert kinds(made.all(), 4) == []
    for rank in range(4):
        events = made.traces[rank].events
        made.change(rank, events=(replace(events[0], value=5), *events[1:]))
    assert kinds(made.all(), 4) == ["sizes_differ"]
    for rank in range(4):
        events = list(made.traces[rank].events)
        events[2] = replace(events[2], free=True)
        made.change(rank, events=tuple(events))
    assert kinds(made.all(), 4) == []


def test_what_a_rank_did_not_come_to_is_not_missed():
    made = MadeWorld(4, [2], [(0, 1, 7), (1, 1, 9)], pairs=True)
    ended = TrialEnded("error", "ValueError", "8 heads are not divisible by 3", "check(heads)", 3, 0, 1, 1, 0)
    traces = made.change(2, events=made.traces[2].events[:2], ended=ended)
    (finding,) = trial_findings(traces, 4)
    assert (finding.kind, finding.ranks, finding.sites) == ("does_not_divide", (2,), ("job.py:3",))
    assert finding.what == "rank 2: ValueError: 8 heads are not divisible by 3"
    assert any("rank 2" in said for said in not_looked_at(traces, left=[]))


@pytest.mark.parametrize(
    ("error", "text", "line", "kind"),
    [
        ("AssertionError", "", "assert heads % tp == 0", "does_not_divide"),
        ("AssertionError", "", "assert ready", "script_error"),
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5", "x.view(2, 3)", "script_error"),
        ("ZeroDivisionError", "integer modulo by zero", "rank % (layers // pp)", "does_not_divide"),
        ("UsageError", "5 bytes cannot be shared equally by 4 ranks", "dist.x()", "does_not_divide"),
        ("StopIteration", "", "next(batches)", "too_few_batches"),
        ("UnsupportedState", "a sparse tensor cannot be carried", "job.track(model)", "cannot_be_carried"),
    ],
)
def test_errors_by_kind(error, text, line, kind):
    made = MadeWorld(4, [2], [(0, 1, 7)], pairs=False)
    ended = TrialEnded("error", error, text, line, 3, 0, 1, 1, 0)
    for rank in range(4):
        made.change(rank, ended=ended)
    (finding,) = trial_findings(made.all(), 4)
    assert (finding.kind, finding.ranks) == (kind, (0, 1, 2, 3))


def test_what_single_ranks_tell():
    made = MadeWorld(4, [2], [(0, 1, 7)], pairs=False)
    asked = (StepsAsked(60, 5),)
    assert kinds(made.change(1, data=(DataSeen("stream", 10, 4),), asked=asked), 4) == []
    assert kinds(made.change(1, data=(DataSeen("once", 60, 4),), asked=asked), 4) == []
    assert kinds(made.change(1, data=(DataSeen("once", 59, 4),), asked=asked), 4) == ["too_few_batches"]
    made.change(1, data=())
    assert kinds(made.change(1, reads=(RankRead("RANK", False, 4),)), 4) == []
    assert kinds(made.change(1, reads=(RankRead("RANK", True, 4),)), 4) == ["rank_before_join"]
    made.change(1, reads=())
    assert kinds(made.change(1, joined=(Joined("init_process_group", 8, -1, 4),)), 4) == ["world_fixed"]
    assert kinds(made.change(1, joined=(Joined("init_process_group", 4, 0, 4),)), 4) == ["rank_fixed"]
    made.change(1, joined=())
    cut = made.change(1, ended=None, cut="hang", cut_text="60 s", stack=("job.py:9", "job.py:2"))
    (finding,) = trial_findings(cut, 4)
    assert finding.kind == "hang" and finding.sites == ("job.py:9",) and "60 s" in finding.what


def test_loaders_of_different_length_and_meshes_of_different_shape():
    made = MadeWorld(4, [2], [(0, 1, 7)], pairs=False)
    for rank in range(4):
        made.change(rank, data=(DataSeen("loop", 9 - (rank == 3), 4),))
    (finding,) = trial_findings(made.all(), 4)
    assert (finding.kind, finding.ranks) == ("uneven_batches", (3,))
    for rank in range(4):
        shape = (2, 2) if rank else (4, 1)
        made.change(rank, data=(), meshes=(MeshAsked(shape, ("dp", "tp"), 4),))
    (finding,) = trial_findings(made.all(), 4)
    assert (finding.kind, finding.ranks) == ("meshes_disagree", (0,)) and "4 x 1 (dp, tp)" in finding.what


def test_memory_is_measured_and_modelled():
    made = MadeWorld(4, [2], [(0, 1, 7)], pairs=False)
    ended = TrialEnded("steps", "", "", "", -1, 2, 100, 900, 400)
    memory = node_memory(made.change(2, ended=ended), 8, node_bytes=4400)
    assert (memory.rank, memory.measured_bytes, memory.modelled_bytes) == (2, 900, 400 + 8 * 500)
    assert memory_finding(memory) == []
    assert memory_finding(replace(memory, node_bytes=4399))[0].kind == "memory"


def test_which_ranks_are_tried_out():
    assert first_ranks(6, [], local=8) == [0, 1, 2, 3, 4, 5]
    assert first_ranks(1024, [700], local=8) == [0, 1023, 700, 512, 1, 7, 8]
    made = MadeWorld(64, [4, 32], [(0, 1, 7)], pairs=True)
    more = more_ranks(made.traces[0], 64)
    assert set(more) >= {0, 1, 2, 3, 4, 59, 60, 31, 32, 63}
    assert kind_of(made.traces[33], 64) == "dimension 0 middle, dimension 1 middle"
    assert peers_of([made.traces[0], made.traces[5]], 64) == [1, 4]


def test_records_survive_their_encoding_and_damage_is_named():
    records = [*records_of_a_step(), exchange(3, 0, 9), WaitKept(3)]
    assert [decode_record(encode_record(record)) for record in records] == records
    trace = trace_of(5, records)
    assert (trace.rank, trace.steps, len(trace.events)) == (5, 2, 2) and not trace.whole
    with pytest.raises(TornRecord):
        decode_record(b'["call",1')
