"""Foreign pickles are read as plain data or not at all."""

from __future__ import annotations

import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import RecordError
from keepstep.intake.plain_pickle import read_plain_pickle

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


class Runs:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@given(plain, st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_plain_data_come_back(value, protocol):
    if protocol < 3 and (
        b"_codecs" in pickle.dumps(value, protocol=protocol) or b"bytes" in pickle.dumps(value, protocol=protocol)
    ):
        return  # bytes need a function below protocol 3
    assert read_plain_pickle(pickle.dumps(value, protocol=protocol)) == (value, True)


@given(plain, st.integers(2, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_a_cut_pickle_gives_something_or_a_clear_error(value, protocol, data):
    content = pickle.dumps({"entries": [value, value]}, protocol=protocol)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        found, complete = read_plain_pickle(cut)
    except RecordError:
        return
    assert not complete
    assert found is None or isinstance(found, dict)


def test_what_came_before_the_cut_is_kept():
    content = pickle.dumps({"version": "2.9", "entries": [{"seq": number} for number in range(100)]}, protocol=2)
    found, complete = read_plain_pickle(content[: len(content) // 2])
    assert not complete
    assert found["version"] == "2.9"
    assert 20 < len(found["entries"]) < 100
    assert found["entries"][7] == {"seq": 7}


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(protocol, tmp_path):
    made = tmp_path / "made"
    for value in (Runs(made), {"entries": [Runs(made)]}, [1, (2, Runs(made))]):
        content = pickle.dumps(value, protocol=protocol)
        for end in (len(content), len(content) - 1, len(content) - 2):
            with pytest.raises(RecordError, match="not a plain pickle"):
                read_plain_pickle(content[:end])
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x02U\x01aQ.",  # persistent object
        b"Pname\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
)
def test_other_ways_to_code_are_refused(content):
    with pytest.raises(RecordError):
        read_plain_pickle(content)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_nonsense_never_raises_anything_else(content):
    try:
        read_plain_pickle(content)
    except RecordError as problem:
        assert problem.what


def test_references_to_the_same_list_do_not_explode():
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    found, complete = read_plain_pickle(pickle.dumps({"entries": value}, protocol=2))
    assert complete
    assert len(found["entries"]) == 2


@pytest.mark.parametrize(
    ("quoted", "value"),
    [(b"'a\\x41\\'\\n\\\\'", "aA'\n\\"), (b'"it\'s"', "it's"), (b"'\\303\\251'", "\xc3\xa9"), (b"''", "")],
)
def test_strings_of_protocol_0(quoted, value):
    assert read_plain_pickle(b"S" + quoted + b"\n.") == (value, True)


@pytest.mark.parametrize("quoted", [b"-" * 20_000, b"(" * 20_000, b"'a", b"'\\u0041'", b"['x']", b"'\\'", b"1"])
def test_what_is_no_string_of_protocol_0(quoted):
    """Nothing of it is handed to a parser of expressions, which deep nesting could exhaust."""
    with pytest.raises(RecordError):
        read_plain_pickle(b"\x80\x02S" + quoted + b"\n.")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}K\x01" + b"\x85" * 1_000_000 + b"K\x02s.",
        b"\x80\x02}(K\x01" + b"\x85" * 1_000_000 + b"K\x02u.",
        b"(K\x01" + b"\x85" * 1_000_000 + b"K\x02d.",
    ],
)
def test_a_container_as_key_is_refused(content):
    """The hash of a deeply nested tuple would overrun the stack of the process."""
    with pytest.raises(RecordError, match="neither text nor number"):
        read_plain_pickle(content)


def test_what_a_cut_leaves_over_is_no_key():
    found, complete = read_plain_pickle(b"\x80\x02}(U\x01aK\x01" + b"K\x02\x85" * 2)
    assert (found, complete) == ({"a": 1}, False)
