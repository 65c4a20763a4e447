"""Journal lines: round trips, versions, migration, torn and damaged input (G-18)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RecordError, SchemaTooNew, TornRecord
from keepstep.records import schema
from keepstep.records.events import (
    FINDING_KINDS,
    LAYERS,
    SCHEMA,
    DrillRecord,
    Event,
    FactRecord,
    Finding,
    Incident,
    JobEnded,
    JobStarted,
    MemberRecord,
    OrderRecord,
    StepProgress,
    Suspect,
)
from keepstep.records.journal_line import MAX_LINE_BYTES, decode_line, decode_lines, encode_line
from keepstep.records.messages import Address, MemberExited, Welcome

SAMPLE = Path(__file__).parent / "samples" / "journal-0.9.jsonl"

names = st.text(max_size=12)
counts = st.integers(0, 2**53)
seconds = st.floats(allow_nan=False, allow_infinity=False)
maybe_seconds = st.none() | seconds
identity = {
    "job": names,
    "attempt": st.none() | counts,
    "generation": st.none() | counts,
    "group": st.none() | names,
    "sequence": st.none() | counts,
    "step": st.none() | counts,
    "rank": st.none() | st.integers(-1, 2**31),
    "role": st.none() | names,
    "member": st.none() | names,
    "node": st.none() | names,
    "device": st.none() | names,
    "link": st.none() | names,
    "path": st.none() | names,
    "wall": seconds,
    "mono_ns": st.none() | st.integers(0, 2**63 - 1),
    "host": st.none() | names,
}
ranks = st.integers(0, 2**31)
suspects = st.builds(Suspect, rank=st.none() | ranks, node=st.none() | names, link=st.none() | st.tuples(ranks, ranks))
exits = st.builds(
    MemberExited,
    member=names,
    rank=ranks,
    code=st.integers(-64, 255),
    signal=st.integers(0, 64),
    private=st.dictionaries(counts, st.binary(max_size=50), max_size=2),
    onset=seconds,
)
events = st.one_of(
    st.builds(JobStarted, script=names, arguments=st.lists(names, max_size=3).map(tuple), world=counts, **identity),
    st.builds(JobEnded, exit_code=st.integers(0, 255), why=names, kept_step_share=maybe_seconds, **identity),
    st.builds(MemberRecord, change=st.sampled_from(["started", "exited", "fenced", "promoted"]), **identity),
    st.builds(FactRecord, fact=exits, **identity),
    st.builds(StepProgress, total=st.none() | counts, loss=maybe_seconds, **identity),
    st.builds(
        Finding,
        kind=st.sampled_from(FINDING_KINDS),
        layer=st.sampled_from(LAYERS),
        suspects=st.lists(st.lists(suspects, max_size=2).map(tuple), max_size=2).map(tuple),
        victims=st.lists(ranks, max_size=3).map(tuple),
        confidence=st.floats(0, 1),
        evidence=st.lists(names, max_size=2).map(tuple),
        **identity,
    ),
    st.builds(Incident, kind=st.sampled_from(FINDING_KINDS), detected=maybe_seconds, bytes_moved=counts, **identity),
    st.builds(DrillRecord, fault=names, **identity),
)


def line_of(**fields: object) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}).encode() + b"\n"


@given(events)
def test_what_is_written_is_read_back(event: Event) -> None:
    line = encode_line(event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    fields = json.loads(line)
    assert fields["record"] == type(event).__name__
    assert fields["schema"] == SCHEMA
    assert decode_line(line) == event


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_as_records(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_line(data)


@given(st.lists(events, max_size=4), st.data())
def test_a_cut_anywhere_keeps_every_whole_record(written: list[Event], data: st.DataObject) -> None:
    lines = [encode_line(event) for event in written]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    kept = sum(end <= cut for end in ends)
    read: list[Event] = []
    try:
        read.extend(decode_lines(whole[:cut].splitlines(keepends=True)))
        torn = False
    except TornRecord as error:
        torn = True
        assert f"line {kept + 1}" in error.where
    # extend() keeps what the iterator gave before it raised
    assert read == written[:kept]
    assert torn == (cut != 0 and cut not in ends)


def test_kinds_are_exactly_the_agreed_ones() -> None:
    assert len(FINDING_KINDS) == 14 and len(LAYERS) == 9
    with pytest.raises(RecordError, match="kind"):
        decode_line(line_of(record="Finding", kind="meltdown"))


def test_a_newer_major_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(SchemaTooNew, match=r"schema 2\.0.*1\.x.*version that wrote it"):
        decode_line(line_of(record="JobEnded", schema="2.0", exit_code=0))


def test_a_newer_minor_version_is_read_without_its_news() -> None:
    line = line_of(record="JobEnded", schema="1.7", exit_code=3, mood="good")
    assert decode_line(line) == JobEnded(schema="1.7", exit_code=3)
    assert decode_line(line_of(record="Weather", schema="1.7")) is None
    assert list(decode_lines([line_of(record="Weather", schema="1.7"), line])) == [JobEnded(schema="1.7", exit_code=3)]


def test_an_unknown_record_of_our_own_version_is_refused() -> None:
    with pytest.raises(RecordError, match="Weather"):
        decode_line(line_of(record="Weather"))


def test_a_0_9_journal_is_migrated() -> None:
    old = list(decode_lines(SAMPLE.read_bytes().splitlines(keepends=True)))
    started, member, finding, incident, ended = old
    assert started == JobStarted(job="gpt", wall=1700000000.5, script="train.py", world=4, standbys=1)
    assert isinstance(member, MemberRecord) and (member.wall, member.signal) == (1700000010.0, 9)
    assert isinstance(finding, Finding) and finding.suspects == ((Suspect(rank=2), Suspect(rank=3)),)
    assert isinstance(incident, Incident)
    assert (incident.detected, incident.joined, incident.first_valid_step) == (0.0125, 0.18, 0.25)
    assert incident.warmed is None
    assert isinstance(ended, JobEnded) and ended.steps_kept == 60
    assert {event.schema for event in old} == {SCHEMA}


def test_every_older_version_leads_to_the_current_one() -> None:
    for version in schema.MIGRATIONS:
        assert schema.migrate({}, version)["schema"] == SCHEMA
    with pytest.raises(RecordError, match=r"no migration from schema 0\.1"):
        decode_line(line_of(record="JobEnded", schema="0.1", exit_code=0))


@pytest.mark.parametrize("bad", ["", "1", "1.x", "1.0.0", "-1.0", "1.0\n", "99999.0"])
def test_nonsense_versions_are_refused(bad: str) -> None:
    with pytest.raises(RecordError, match="not a schema version"):
        decode_line(line_of(record="JobEnded", schema=bad, exit_code=0))


def test_old_fields_of_a_wrong_type_are_refused() -> None:
    bad = {"record": "Incident", "schema": "0.9", "kind": "crash", "detected_ms": "soon"}
    with pytest.raises(RecordError, match="of its schema"):
        decode_line(line_of(**bad))


def test_a_secret_never_reaches_a_line() -> None:
    address = Address(member="m", node="n", local="l", host="h", port=1)
    welcome = Welcome(
        epoch=1,
        rank=0,
        world=1,
        local_rank=0,
        generation=1,
        attempt=0,
        joiner=False,
        roster={0: address},
        secret=b"key!",
    )
    line = encode_line(OrderRecord(order=welcome, epoch=1, target="m", reason="start"))
    blanked = OrderRecord(order=msgspec.structs.replace(welcome, secret=b""), epoch=1, target="m", reason="start")
    assert b"a2V5IQ" not in line
    assert decode_line(line) == blanked


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_cannot_be_read_back_is_not_written(value: float) -> None:
    with pytest.raises(RecordError, match="Finding would not be readable"):
        encode_line(Finding(kind="crash", confidence=value))
    assert decode_line(encode_line(StepProgress(loss=value))) == StepProgress()


def test_lines_are_bounded() -> None:
    with pytest.raises(RecordError, match="at most"):
        encode_line(JobEnded(exit_code=0, why="x" * MAX_LINE_BYTES))
    with pytest.raises(RecordError, match="at most"):
        decode_line(b"x" * (MAX_LINE_BYTES + 1))


def test_damage_in_the_middle_is_not_called_torn() -> None:
    good = encode_line(JobEnded(exit_code=0))
    for bad in (b"{broken\n", b"\x00\x00\n", good[:-5] + b"\n"):
        read: list[Event] = []
        with pytest.raises(RecordError, match=r"line 2.*damaged in the middle") as caught:
            read.extend(decode_lines([good, bad, good]))
        assert not isinstance(caught.value, TornRecord)
        assert read == [JobEnded(exit_code=0)]
    with pytest.raises(TornRecord, match="line 2"):
        list(decode_lines([good, b"{broken\n"], where="journal"))


def test_a_refused_record_at_the_end_is_not_called_torn() -> None:
    for bad, kind in (
        (line_of(record="JobEnded", schema="3.0"), SchemaTooNew),
        (line_of(record="Nonsense"), RecordError),
    ):
        with pytest.raises(kind, match="line 1") as caught:
            list(decode_lines([bad]))
        assert type(caught.value) is kind
