"""Recordings of first steps: what is written is read, everything else is refused in one line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RecordError, UsageError
from keepstep.records.step_recording import (
    HEAD_BYTES,
    MAX_RECORDING_BYTES,
    RecordedCall,
    Recording,
    RecordingKey,
    check_key,
    decode_recording,
    encode_recording,
)

KEY = RecordingKey(job="j", script="s", world=4, kind="k", keepstep="1", torch="2.13.0", python="3.11")


@st.composite
def calls(draw: st.DrawFn) -> RecordedCall:
    heads = draw(st.lists(st.binary(max_size=64), max_size=4))
    sizes = tuple(len(head) + draw(st.integers(0, 100)) for head in heads)
    peer, tag = draw(st.integers(-1, 7)), draw(st.integers(0, 99))
    op, element = draw(st.integers(1, 11)), draw(st.integers(0, 14))
    return RecordedCall(draw(st.sampled_from(["0", "1", "mesh"])), op, element, peer, tag, sizes, tuple(heads))


RECORDINGS = st.builds(Recording, st.just(KEY), st.integers(0, 3), st.lists(calls(), max_size=8).map(tuple))


@given(RECORDINGS)
def test_what_is_written_is_read(recording: Recording) -> None:
    assert decode_recording(encode_recording(recording)) == recording


@given(RECORDINGS, st.data())
def test_damage_is_told_and_never_more(recording: Recording, data: st.DataObject) -> None:
    """A file with a changed byte or a cut end is either refused or still a recording; nothing else can come of it."""
    raw = bytearray(encode_recording(recording))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(decode_recording(bytes(raw)), Recording)
    except RecordError as error:
        assert "\n" not in str(error)
    with pytest.raises(RecordError):
        decode_recording(bytes(raw[: data.draw(st.integers(0, len(raw) - 1))]))


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_recording(data)


def test_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(RecordError, match="larger"):
        decode_recording(bytes(MAX_RECORDING_BYTES + 1))


def test_too_much_is_not_written() -> None:
    call = RecordedCall("0", 1, 10, -1, 0, (HEAD_BYTES,), (bytes(HEAD_BYTES),))
    with pytest.raises(RecordError, match="at most"):
        encode_recording(Recording(KEY, 0, (call,) * 200))


def test_a_head_longer_than_its_output_is_damage() -> None:
    call = RecordedCall("0", 1, 10, -1, 0, (4,), (bytes(8),))
    with pytest.raises(RecordError, match="heads"):
        decode_recording(encode_recording(Recording(KEY, 0, (call,))))


@pytest.mark.parametrize("field", RecordingKey.__struct_fields__)
def test_another_job_or_layout_is_named(field: str) -> None:
    """Each part of the key is checked; the line says which one differs."""
    other = msgspec.structs.replace(KEY, **{field: 5 if field == "world" else "other"})
    with pytest.raises(UsageError, match=f"another {field} "):
        check_key(other, KEY)
    check_key(KEY, KEY)
