"""A member's ring becomes windows of whole steps, or its progress, and never more than 1 KB/s."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_writer import RingWriter

from keepstep.diagnosis.summarise import Summariser
from keepstep.errors import RecordError
from keepstep.records.ring import OpSlot, PeerSlot, SlotStatus, SpanKind, SpanSlot
from keepstep.records.summary import BYTES_PER_S, HostSample
from keepstep.records.summary_rows import GROUP_ROW, PEER_ROW, STEP_ROW, unpacked

MS = 1_000_000
START = 10**12


def span(what: SpanKind, step: int, began: int, *, ended: int, generation: int = 5) -> SpanSlot:
    return SpanSlot(0, what, SlotStatus.DONE if ended else SlotStatus.RUNNING, step, began, ended, generation)


def call(step: int, began: int, ended: int, *, sequence: int = 0, group: int = 77, peers=(), op: int = 1) -> OpSlot:
    status = SlotStatus.DONE if ended else SlotStatus.RUNNING
    return OpSlot(0, op, 1, 10, 0, status, group, 5, sequence, step, 100, 400, began, began, ended, 3, 0, tuple(peers))


def peer(rank: int, *, credit: int = 0, waited: int = 0) -> PeerSlot:
    return PeerSlot(0, 0, rank, 2, 200, 300, 1000, credit, 2000, waited)


def written(steps: int = 3, *, capacity: int = 4096, spans: bool = True) -> RingWriter:
    """Steps of 100 ms, 10 ms apart: 5 ms data, a call from 40 to 60 ms and one from 50 to 70 ms."""
    ring = RingWriter(capacity)
    ring.put_group(0, b"tp", group_hash=77, counts=(2 * steps, 2 * steps, 2 * steps))
    for step in range(steps):
        began = START + step * 110 * MS
        if spans:
            ring.put_span(span(SpanKind.STEP, step, began, ended=began + 100 * MS))
            ring.put_span(span(SpanKind.DATA, step, began, ended=began + 5 * MS))
        ring.put(call(step, began + 40 * MS, began + 60 * MS, sequence=2 * step, peers=[peer(1, waited=7 * MS)]))
        ring.put(call(step, began + 50 * MS, began + 70 * MS, sequence=2 * step + 1, peers=[peer(2, credit=3 * MS)]))
    return ring


def drained(ring: RingWriter, now_ns: int = START + 10**9):
    return Summariser().drain(ring.buffer, HostSample(), now_ns=now_ns)


def test_the_time_of_a_step_is_split():
    rows = unpacked([drained(written()).window.steps], STEP_ROW)
    assert rows["step"].tolist() == [0, 1, 2]
    assert rows["duration_us"].tolist() == [100_000] * 3
    assert rows["data_us"].tolist() == [5_000] * 3
    assert rows["own_us"].tolist() == [65_000] * 3


def test_groups_and_peers_are_summed():
    window = drained(written()).window
    (group,) = unpacked([window.groups], GROUP_ROW)
    assert (group["hash"], group["size"], group["group_rank"], group["calls"]) == (77, 4, 1, 6)
    assert (group["busy_us"], group["credit_us"], group["peer_us"]) == (120_000, 9_000, 21_000)
    peers = unpacked([window.peers], PEER_ROW)
    assert peers["peer"].tolist() == [1, 2]
    assert peers["peer_us"].tolist() == [21_000, 0]
    assert peers["sent"].tolist() == [600, 600]


def test_the_group_table_goes_up_where_a_group_is_new_and_then_rarely():
    """A window that carries it is longer, and the next one waits for that."""
    ring, summariser, told = RingWriter(4096), Summariser(), []
    for step in range(40):
        began = START + step * 1000 * MS
        ring.put_span(span(SpanKind.STEP, step, began, ended=began + 100 * MS))
        ring.put(call(step, began + 40 * MS, began + 60 * MS, sequence=step, group=77 if step < 5 else 78))
        window = summariser.drain(ring.buffer, HostSample(), now_ns=began + 500 * MS).window
        told += [step] if window.groups else []
    assert told == [0, 5, 35]


def test_a_new_generation_tells_its_groups_again():
    ring, summariser = written(2), Summariser()
    assert summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9).window.groups
    ring.put_at(64, "<I", 6)
    began = START + 2000 * MS
    ring.put_span(span(SpanKind.STEP, 0, began, ended=began + 100 * MS, generation=6))
    ring.put(msgspec.structs.replace(call(0, began + MS, began + 9 * MS), generation=6))
    assert summariser.drain(ring.buffer, HostSample(), now_ns=began + 500 * MS).window.groups


def test_data_before_the_step_counts_as_data():
    ring = RingWriter(64)
    ring.put_span(span(SpanKind.STEP, 0, START, ended=START + 10 * MS))
    ring.put_span(span(SpanKind.DATA, 0, START + 12 * MS, ended=START + 18 * MS))
    ring.put_span(span(SpanKind.STEP, 1, START + 20 * MS, ended=START + 30 * MS))
    rows = unpacked([drained(ring).window.steps], STEP_ROW)
    assert rows["data_us"].tolist() == [0, 6_000]


def test_without_spans_a_step_lasts_to_the_next_ones_first_call():
    window = drained(written(spans=False)).window
    assert (window.first_step, window.last_step) == (0, 1)
    rows = unpacked([window.steps], STEP_ROW)
    assert rows["duration_us"].tolist() == [110_000, 110_000]
    assert rows["own_us"].tolist() == [80_000, 80_000]


def test_a_step_is_told_once_and_the_open_one_not_at_all():
    ring, summariser = written(2), Summariser()
    first = summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9).window
    began = START + 220 * MS
    ring.put_span(span(SpanKind.STEP, 2, began, ended=0))
    ring.put(call(2, began + MS, began + 2 * MS, sequence=4))
    second = summariser.drain(ring.buffer, HostSample(), now_ns=START + 3 * 10**9)
    assert (first.first_step, first.last_step) == (0, 1)
    assert second.window is None
    progress = second.progress
    assert (progress.span, progress.span_us) == (SpanKind.STEP, (3 * 10**9 - 220 * MS) // 1000)
    ring.put_at(73728 + 128 * 12 + 32, "<Q", began + 50 * MS)  # the span's end, written in place
    ring.put_at(73728 + 128 * 12 + 13, "<B", 2)
    third = summariser.drain(ring.buffer, HostSample(), now_ns=START + 5 * 10**9).window
    assert (third.first_step, third.last_step) == (2, 2)
    (row,) = unpacked([third.steps], STEP_ROW)
    assert row["duration_us"] - row["own_us"] == 1_000


def test_progress_names_the_call_under_way():
    ring = written(1)
    summariser = Summariser()
    summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9)
    ring.put_group(0, b"tp", group_hash=77, counts=(4, 3, 2))
    ring.put(call(1, START + 200 * MS, 0, sequence=2))
    progress = summariser.drain(ring.buffer, HostSample(9, 8, "S", 5), now_ns=START + 2 * 10**9).progress
    (mark,) = progress.groups
    assert (mark.queued, mark.started, mark.finished) == (4, 3, 2)
    assert (mark.op, mark.element, mark.count, mark.sequence) == (1, 10, 100, 2)
    assert mark.open_us == 1_800_000
    assert progress.host == HostSample(9, 8, "S", 5)


def test_messages_under_way_name_what_they_wait_for():
    ring = written(1)
    ring.put_at(128 + 128, "<56sIIIiQQQI", b"pipe", 88, 1, 2, 0, 2, 2, 0, 5)
    ring.put(call(1, START + 200 * MS, 0, group=88, op=10, peers=[PeerSlot(0, 0, 4, 1, 16, 0, 0, 0, 900 * MS, 0)]))
    ring.put(call(1, START + 200 * MS, 0, group=88, op=11, peers=[PeerSlot(0, 0, 4, 1, 0, 8, 0, 0, 0, 700 * MS)]))
    summariser = Summariser()
    summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9)
    progress = summariser.drain(ring.buffer, HostSample(), now_ns=START + 2 * 10**9).progress
    mark = next(mark for mark in progress.groups if mark.lane == 1)
    (stalled,) = mark.peers
    assert (stalled.peer, stalled.bytes_sent, stalled.bytes_received) == (4, 16, 8)
    assert (stalled.wire_us, stalled.wait_peer_us) == (900_000, 700_000)
    assert [transfer.send for transfer in progress.transfers] == [True, False]


def test_what_was_overtaken_is_counted():
    ring = written(400, capacity=256)
    window = drained(ring, START + 60 * 10**9).window
    assert window.lost == ring.head - 256
    assert window.last_step == 399


def test_a_reserved_slot_is_not_read_and_not_passed():
    ring, summariser = written(2), Summariser()
    place = ring.reserve()
    summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9)
    began = START + 220 * MS
    ring.put_at(73728 + 128 * place + 8, "<6BH", 3, SpanKind.STEP, 0, 0, 0, 2, 0)
    ring.put_at(73728 + 128 * place + 16, "<qQQI", 2, began, began + 5 * MS, 5)
    ring.put_at(73728 + 128 * place, "<Q", place + 1)
    window = summariser.drain(ring.buffer, HostSample(), now_ns=START + 3 * 10**9).window
    assert (window.first_step, window.last_step) == (2, 2)


def test_a_new_generation_starts_afresh():
    ring, summariser = written(2), Summariser()
    first = summariser.drain(ring.buffer, HostSample(), now_ns=START + 10**9)
    assert [entry.name for entry in first.profile.groups] == ["tp"]
    ring.put_at(64, "<I", 6)
    began = START + 300 * MS
    ring.put_span(span(SpanKind.STEP, 1, began, ended=began + MS, generation=6))
    again = summariser.drain(ring.buffer, HostSample(), now_ns=START + 3 * 10**9)
    assert again.profile.generation == 6
    assert (again.window.generation, again.window.first_step) == (6, 1)


def test_the_host_counters_are_differences():
    ring, summariser = written(1), Summariser()
    summariser.drain(ring.buffer, HostSample(100, 10), now_ns=START + 10**9)
    began = START + 110 * MS
    ring.put_span(span(SpanKind.STEP, 1, began, ended=began + MS))
    window = summariser.drain(ring.buffer, HostSample(160, 40), now_ns=START + 3 * 10**9).window
    assert (window.cpu_us, window.run_delay_us, window.span_us) == (60, 30, 2_000_000)


def test_what_is_no_ring_is_refused():
    with pytest.raises(RecordError):
        Summariser().drain(bytes(200_000), HostSample(), now_ns=1)


def busy(seconds: int):
    """64 collectives a step in four groups of eight, ten steps a second: (ring, monotonic time) after each 0.1 s."""
    ring, hashes = RingWriter(16384), (11, 22, 33, 44)
    for place, value in enumerate(hashes):
        ring.put_group(place, b"group%d" % place, group_hash=value, counts=(9, 9, 9))
    for step in range(10 * seconds):
        began = START + step * 100 * MS
        ring.put_span(span(SpanKind.STEP, step, began, ended=began + 99 * MS))
        for number in range(64):
            at = began + number * MS + 123_457
            peers = [peer(8 * (number % 4) + near, credit=12_345, waited=54_321) for near in (1, 7)]
            ring.put(call(step, at, at + 701_003, sequence=number, group=hashes[number % 4], peers=peers))
        yield ring, began + 100 * MS


def test_a_busy_rank_says_less_than_a_kilobyte_a_second():
    summariser, said, seconds = Summariser(), 0, 12
    for ring, now_ns in busy(seconds):
        host = HostSample(now_ns // 1700, now_ns // 31_000)
        for part in msgspec.structs.astuple(summariser.drain(ring.buffer, host, now_ns=now_ns)):
            said += len(msgspec.msgpack.encode(part)) if part is not None else 0
    assert 0 < said <= BYTES_PER_S * seconds


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=20))
def test_the_parts_of_a_step_never_exceed_it(stretches):
    ring = RingWriter(256)
    ring.put_span(span(SpanKind.STEP, 0, START, ended=START + 100 * MS))
    covered = np.zeros(100, bool)
    for sequence, (began, lasted) in enumerate(stretches):
        ring.put(call(0, START + began * MS, START + (began + lasted) * MS, sequence=sequence))
        covered[began : began + lasted] = True
    (row,) = unpacked([drained(ring).window.steps], STEP_ROW)
    assert row["own_us"] == (100 - covered.sum()) * 1000


@given(st.integers(20, 60), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_step_is_told_once_however_often_it_is_asked(capacity, turns):
    ring, summariser, told, step = RingWriter(capacity), Summariser(), [], 0
    for turn, count in enumerate(turns):
        for _ in range(count):
            began = START + step * 10 * MS
            ring.put_span(span(SpanKind.STEP, step, began, ended=began + 5 * MS))
            ring.put(call(step, began + MS, began + 2 * MS, sequence=step))
            step += 1
        window = summariser.drain(ring.buffer, HostSample(), now_ns=START + (turn + 1) * 10**10).window
        told.append((window.first_step, window.last_step))
    bounds = list(itertools.chain.from_iterable(told))
    assert bounds[-1] == step - 1
    assert all(later == earlier + 1 for (_, earlier), (later, _) in itertools.pairwise(told))
