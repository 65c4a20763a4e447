"""Collectives give the right numbers, and the same bits over shared memory, TCP and any mix."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_rig import KINDS, Group, all_reduce, span, spans

from keepstep.errors import UsageError
from keepstep.training.plane import Call, Element, Op, Reduction, Status

NUMPY = {
    Element.UINT8: np.uint8,
    Element.INT8: np.int8,
    Element.INT16: np.int16,
    Element.INT32: np.int32,
    Element.INT64: np.int64,
    Element.UINT16: np.uint16,
    Element.UINT32: np.uint32,
    Element.UINT64: np.uint64,
    Element.FLOAT16: np.float16,
    Element.BFLOAT16: np.uint16,
    Element.FLOAT32: np.float32,
    Element.FLOAT64: np.float64,
    Element.BOOL: np.bool_,
    Element.COMPLEX64: np.complex64,
    Element.COMPLEX128: np.complex128,
}
BITWISE = {Reduction.BAND, Reduction.BOR, Reduction.BXOR}
FLOATS = {Element.FLOAT16, Element.BFLOAT16, Element.FLOAT32, Element.FLOAT64}
COMPLEX = {Element.COMPLEX64, Element.COMPLEX128}


def sensible(element: Element, how: Reduction) -> bool:
    if how in BITWISE:
        return element not in FLOATS | COMPLEX
    if how is Reduction.AVG:
        return element in FLOATS | COMPLEX
    return not (how in (Reduction.MIN, Reduction.MAX) and element in COMPLEX)


def values(element: Element, count: int, seed: int) -> np.ndarray:
    """Random elements, small enough not to overflow a half float."""
    rng = np.random.default_rng(seed)
    if element is Element.BOOL:
        return rng.integers(0, 2, count).astype(np.bool_)
    if element is Element.BFLOAT16:
        return (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if element in FLOATS:
        return rng.standard_normal(count).astype(NUMPY[element])
    if element in COMPLEX:
        return (rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(NUMPY[element])
    return rng.integers(0, 120, count).astype(NUMPY[element])


def widened(element: Element, array: np.ndarray) -> np.ndarray:
    if element is Element.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if element in FLOATS else array


def expected(element: Element, how: Reduction, arrays: list[np.ndarray]) -> np.ndarray:
    """The reduction in a wider type (floats) or the same (integers)."""
    wide = [widened(element, array) for array in arrays]
    if element is Element.BOOL:
        table = {Reduction.SUM: np.logical_or, Reduction.PRODUCT: np.logical_and, Reduction.MIN: np.logical_and}
        table |= {Reduction.MAX: np.logical_or, Reduction.BAND: np.logical_and, Reduction.BOR: np.logical_or}
        return np.logical_xor.reduce(wide) if how is Reduction.BXOR else table[how].reduce(wide)
    table = {Reduction.SUM: np.add, Reduction.AVG: np.add, Reduction.PRODUCT: np.multiply, Reduction.MIN: np.minimum}
    table |= {Reduction.MAX: np.maximum, Reduction.BAND: np.bitwise_and, Reduction.BOR: np.bitwise_or}
    result = wide[0]
    for other in wide[1:]:
        result = (np.bitwise_xor if how is Reduction.BXOR else table[how])(result, other)
    return result / len(arrays) if how is Reduction.AVG else result


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("element", list(Element))
def test_every_reduction_of_every_element(kind: str, element: Element) -> None:
    group = Group(3, KINDS[kind])
    tolerance = {Element.FLOAT16: 1e-2, Element.BFLOAT16: 6e-2}.get(element, 1e-5)
    for how in Reduction:
        for count in (0, 2, 301, 70_001):
            arrays = [values(element, count, seed) for seed in range(3)]
            want = expected(element, how, arrays) if sensible(element, how) else None
            calls = [all_reduce(array, element=element, how=how) for array in arrays]
            if want is None:
                with pytest.raises(UsageError, match="not defined"):
                    group.planes[0].submit(calls[0])
                continue
            assert group.run(calls) == [Status.DONE] * 3
            for array in arrays:
                if element in FLOATS | COMPLEX:
                    np.testing.assert_allclose(widened(element, array), want, rtol=tolerance, atol=tolerance)
                else:
                    assert np.array_equal(array, want)
    group.close()


def program(group: Group) -> str:
    """Runs every op over odd sizes; returns a hash of all outputs."""
    size, digest = group.size, hashlib.sha256()

    def add(calls: list[Call], outputs: list[np.ndarray]) -> None:
        assert group.run(calls) == [Status.DONE] * size
        for output in outputs:
            digest.update(output.tobytes())

    pairs = [(e, h) for e in Element for h in Reduction if sensible(e, h)]
    for i, (element, how) in enumerate(pairs):
        count = (0, 1, size - 1, 17, 16_411, 40_003, 263_001)[i % 7]
        arrays = [values(element, count, 10 * i + r) for r in range(size)]
        add([all_reduce(a, element=element, how=how) for a in arrays], arrays)
    for i, nbytes in enumerate((0, 1, 5, 4096, 70_001, 600_003)):
        root = i % size
        arrays = [values(Element.FLOAT32, nbytes // 4, r) for r in range(size)]
        outs = [np.zeros_like(a) for a in arrays]
        reduce = [
            Call(Op.REDUCE, Element.FLOAT32, root=root, inputs=[span(arrays[r])], outputs=[span(outs[r])] * (r == root))
            for r in range(size)
        ]
        add(reduce, [*outs, *arrays])
        blobs = [values(Element.UINT8, nbytes, r) for r in range(size)]
        cast = [
            Call(Op.BROADCAST, root=root, **{"inputs" if r == root else "outputs": [span(blobs[r])]})  # type: ignore[arg-type]
            for r in range(size)
        ]
        add(cast, blobs)
        assert all(np.array_equal(blobs[root], blob) for blob in blobs)
        uneven = [nbytes // 4 * (r % 3) // 2 for r in range(size)]
        parts = [values(Element.FLOAT32, uneven[r], r) for r in range(size)]
        gathered = [[np.zeros(n, np.float32) for n in uneven] for _ in range(size)]
        calls = [Call(Op.ALL_GATHER, inputs=[span(parts[r])], outputs=spans(gathered[r])) for r in range(size)]
        add(calls, [a for row in gathered for a in row])
        assert all(np.array_equal(gathered[r][s], parts[s]) for r in range(size) for s in range(size))
        pieces = [[values(Element.FLOAT16, n, 7 * r + k) for k, n in enumerate(uneven)] for r in range(size)]
        kept = [np.zeros(n, np.float16) for n in uneven]
        scatter = [
            Call(Op.REDUCE_SCATTER, Element.FLOAT16, Reduction.AVG, inputs=spans(pieces[r]), outputs=[span(kept[r])])
            for r in range(size)
        ]
        add(scatter, [*kept, *(a for row in pieces for a in row)])
        table = [
            [values(Element.UINT8, (r * 31 + s * 17 + nbytes) % 9000, r) for s in range(size)] for r in range(size)
        ]
        received = [[np.zeros_like(table[s][r]) for s in range(size)] for r in range(size)]
        calls = [Call(Op.ALL_TO_ALL, inputs=spans(table[r]), outputs=spans(received[r])) for r in range(size)]
        add(calls, [a for row in received for a in row])
        assert all(np.array_equal(received[r][s], table[s][r]) for r in range(size) for s in range(size))
        outs = [np.zeros_like(b) for b in blobs]
        inputs = [values(Element.UINT8, nbytes, 50 + r) for r in range(size)]
        calls = [
            Call(Op.GATHER, root=root, inputs=[span(inputs[r])], outputs=spans(outs) if r == root else ())
            for r in range(size)
        ]
        add(calls, outs)
        assert all(np.array_equal(a, b) for a, b in zip(inputs, outs, strict=True))
        outs = [np.zeros_like(b) for b in blobs]
        calls = [
            Call(Op.SCATTER, root=root, inputs=spans(inputs) if r == root else (), outputs=[span(outs[r])])
            for r in range(size)
        ]
        add(calls, outs)
        assert all(np.array_equal(a, b) for a, b in zip(inputs, outs, strict=True))
        add([Call(Op.BARRIER) for _ in range(size)], [])
    return digest.hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_same_bits_whatever_carries_them(size: int) -> None:
    hashes = set()
    for kind in KINDS.values():
        group = Group(size, kind)
        hashes.add(program(group))
        group.close()
    assert len(hashes) == 1


def test_several_tensors_in_one_call() -> None:
    group = Group(3, KINDS["mixed"])
    arrays = [[np.full(n, r + 1, np.float32) for n in (3, 0, 40_000, 7)] for r in range(3)]
    calls = [Call(Op.ALL_REDUCE, Element.FLOAT32, inputs=spans(row), outputs=spans(row)) for row in arrays]
    assert group.run(calls) == [Status.DONE] * 3
    assert all((a == 6).all() for row in arrays for a in row)
    group.close()


def test_inputs_are_not_changed_when_outputs_are_apart() -> None:
    group = Group(4, KINDS["mixed"])
    for count in (5, 100_003):
        inputs = [np.full(count, r + 1, np.float64) for r in range(4)]
        outputs = [np.zeros(count) for _ in range(4)]
        calls = [
            Call(Op.ALL_REDUCE, Element.FLOAT64, Reduction.AVG, inputs=[span(a)], outputs=[span(b)])
            for a, b in zip(inputs, outputs, strict=True)
        ]
        assert group.run(calls) == [Status.DONE] * 4
        assert all((b == 2.5).all() for b in outputs)
        assert all((a == r + 1).all() for r, a in enumerate(inputs))
    group.close()


def test_special_floats_reduce_alike_everywhere() -> None:
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 3e38], np.float32)
    hashes = set()
    for kind in KINDS.values():
        group, rng = Group(4, kind), np.random.default_rng(1)
        for how in (Reduction.SUM, Reduction.PRODUCT, Reduction.MIN, Reduction.MAX):
            arrays = [rng.choice(odd, 50_001).astype(np.float32) for _ in range(4)]
            assert group.run([all_reduce(a, how=how) for a in arrays]) == [Status.DONE] * 4
            assert len({a.tobytes() for a in arrays}) == 1
            hashes.add((how, arrays[0].tobytes()))
        group.close()
    assert len(hashes) == 4


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 90_000), st.booleans()), min_size=1, max_size=6))
def test_a_queue_of_calls_runs_in_order(size: int, sizes: list[tuple[int, bool]]) -> None:
    group = Group(size, KINDS["mixed2"])
    arrays = [[np.full(n, r + 1, np.int64) for n, _ in sizes] for r in range(size)]
    tickets = []
    for i in range(len(sizes)):
        tickets.append(group.submit([all_reduce(arrays[r][i], element=Element.INT64) for r in range(size)]))
    for row in tickets:
        assert group.wait(row) == [Status.DONE] * size
    assert all((a == size * (size + 1) // 2).all() for row in arrays for a in row)
    group.close()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 64, 1000])
def test_few_peers_are_needed(size: int) -> None:
    """At most log2(N) + 2 links for all_reduce, broadcast and barrier (transport.md)."""
    group = Group(1, KINDS["shm"])
    from keepstep.training.plane import Lane, Plane

    for rank in {0, 1, size // 2, size - 1}:
        plane = Plane(
            group.domains[0], rank, size=size, lane=Lane.COLLECTIVE, group="g", global_ranks=tuple(range(size))
        )
        needed = set()
        for nbytes in (8, 1 << 26):
            for op in (Op.ALL_REDUCE, Op.BARRIER, Op.BROADCAST):
                needed |= plane.peers_needed(op, nbytes=nbytes)
        assert len(needed) <= size.bit_length() + 2
        plane.close()
    group.close()


def test_peers_needed_are_enough_and_no_more() -> None:
    """Without any other link every call still ends."""
    size = 6
    for op, nbytes in ((Op.ALL_REDUCE, 8), (Op.ALL_REDUCE, 400_000), (Op.BROADCAST, 400_000), (Op.REDUCE, 400_000)):
        group = Group(size, KINDS["shm"])
        needed = [p.peers_needed(op, nbytes=nbytes, root=2) for p in group.planes]
        for a, plane in enumerate(group.planes):
            for b in range(size):
                if a != b and b not in needed[a]:
                    assert a not in needed[b]
                    plane.unlink(b)
        arrays = [np.ones(nbytes // 4, np.float32) for _ in range(size)]
        calls = []
        for rank, array in enumerate(arrays):
            gives = op is not Op.BROADCAST or rank == 2
            takes = op is Op.ALL_REDUCE or (op is Op.REDUCE) == (rank == 2)
            call = Call(op, Element.FLOAT32, timeout_s=20, root=0 if op is Op.ALL_REDUCE else 2)
            call.inputs = [span(array)] if gives else ()
            call.outputs = [span(array)] if takes and not (op is Op.BROADCAST and gives) else ()
            calls.append(call)
        assert group.run(calls) == [Status.DONE] * size
        group.close()
