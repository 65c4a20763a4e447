"""The tree codec: what goes in comes out, bit for bit; anything else is refused by its place."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import TornRecord, UnsupportedState
from keepstep.training.tree import Sharded, dumps, flatten, pack
from keepstep.training.treereader import loads, unpack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=600)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3])])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def bits(value: Any) -> Any:
    """A tree in which equality means equal types and bits (nan and -0.0 included)."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack("<dd", value.real, value.imag))
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(one)) for key, one in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(one) for one in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), {bits(one) if not isinstance(one, tuple) else one for one in value})
    return (type(value), value)


@given(TREES)
def test_round_trip(tree: Any) -> None:
    assert bits(loads(dumps(tree))) == bits(tree)
    data, tensors = pack(tree)
    assert tensors == []
    assert bits(unpack(data)) == bits(tree)


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_canonical_bytes_do_not_depend_on_the_order_of_keys(tree: dict[str, int]) -> None:
    turned = dict(reversed(tree.items()))
    assert flatten(tree, canonical=True).data == flatten(turned, canonical=True).data
    assert loads(flatten(turned, canonical=True).data) == tree


def check_torn_or_whole(data: bytes) -> None:
    """Foreign bytes are refused as such, or are a tree that can be written again."""
    try:
        tree = loads(data)
    except TornRecord:
        return
    assert dumps(tree)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_tree_or_torn(data: bytes) -> None:
    """G-17."""
    check_torn_or_whole(data)


@given(TREES, st.data())
def test_damaged_bytes_are_a_tree_or_torn(tree: Any, data: st.DataObject) -> None:
    """G-17."""
    whole = bytearray(dumps(tree))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    check_torn_or_whole(bytes(whole))
    with pytest.raises(TornRecord):
        loads(dumps(tree)[:-1])


def test_tensors_become_numbered_references() -> None:
    weight, other = torch.randn(3), torch.nn.Parameter(torch.randn(2, 2))
    packed = flatten({"a": [weight, 1], "b": {"c": other, "again": weight}}, root="state")
    assert packed.tensors[0] is weight and packed.tensors[1] is other and len(packed.tensors) == 2
    assert packed.paths == ["state.a[0]", "state.b.c"]
    tree = unpack(packed.data, ["first", "second"])
    assert tree == {"a": ["first", 1], "b": {"c": "second", "again": "first"}}
    with pytest.raises(TornRecord):
        unpack(packed.data, ["first"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_inline_tensors(dtype: torch.dtype) -> None:
    for tensor in (torch.randn(3, 4).to(dtype), torch.randn(4, 3).to(dtype).T, torch.ones((), dtype=dtype)):
        back = loads(dumps([tensor]))[0]
        assert back.dtype == dtype and torch.equal(back, tensor)


def test_numpy_values() -> None:
    for value in (numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.datetime64("2026-01-01")):
        back = loads(dumps(value))
        assert type(back) is type(value) and back == value
    array = numpy.arange(12, dtype="<u2").reshape(3, 4).T
    assert numpy.array_equal(loads(dumps(array)), array) and loads(dumps(array)).dtype == array.dtype
    assert numpy.isnan(loads(dumps(numpy.float64("nan"))))


def test_sharded_values() -> None:
    local = torch.randn(2)
    sharded = Sharded(local, (("shard", 0),), (4,), (1,), (("dp",), (2,)))
    data, tensors = pack({"p": sharded})
    assert tensors[0] is local
    assert unpack(data, [local])["p"] == sharded


def test_long_bytes_are_stored_once() -> None:
    blob = bytes(range(256)) * 8
    data = dumps([blob, {"again": bytes(blob)}, blob])
    assert len(data) < 2 * len(blob)
    assert loads(data) == [blob, {"again": blob}, blob]


def loop() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


class Odd(dict):  # type: ignore[type-arg]
    """A subclass: what it means is not known."""


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"scheduler": {"lr_lambdas": [math.sin]}}, "scheduler.lr_lambdas[0]"),
        ({"a": [0, {"b": object()}]}, "a[1].b"),
        ({"a": {3: defaultdict(int)}}, "a[3]"),
        ({"a": Odd()}, "a"),
        ({"a": torch.empty(2, device="meta")}, "a"),
        ({"a": torch.ones(2).to_sparse()}, "a"),
        ({"a": numpy.array([object()])}, "a"),
        (loop(), "[0][0]"),
    ],
)
def test_what_cannot_be_carried_is_named(tree: Any, place: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        dumps(tree)
    assert caught.value.where.startswith(place)
