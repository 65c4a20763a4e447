"""A call of a process group as primitives of a communicator whose ranks need not be in the order of the roles."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.training.comm_library import Step
from keepstep.training.plane import Call, Element, Op, Reduction

__all__ = ["carries", "steps_of"]

_Span = tuple[int, int]

_WHOLE_NUMBERS = (Element.INT8, Element.UINT8, Element.INT32, Element.UINT32, Element.INT64, Element.UINT64)
_FLOATS = (Element.FLOAT16, Element.BFLOAT16, Element.FLOAT32, Element.FLOAT64)
_ORDINARY = (Reduction.SUM, Reduction.PRODUCT, Reduction.MIN, Reduction.MAX)


def carries(element: Element, reduction: Reduction) -> bool:
    """Whether the library can reduce so; equal on all members. What is only moved is moved as bytes."""
    if reduction is Reduction.AVG:
        return element in _FLOATS
    return reduction in _ORDINARY and element in _WHOLE_NUMBERS + _FLOATS


def steps_of(call: Call, own: int, *, order: Sequence[int]) -> list[Step]:
    """The primitives of `call` for the role `own`; `order[rank]` is the role of each rank of the communicator.

    Point-to-point messages and barriers are no business of a communicator here: they give ValueError.
    """
    rank_of = {role: rank for rank, role in enumerate(order)}
    makers = {
        Op.ALL_REDUCE: _reduced,
        Op.REDUCE: _reduced,
        Op.BROADCAST: _broadcast,
        Op.ALL_GATHER: _gathered_by_all,
        Op.REDUCE_SCATTER: _reduced_and_scattered,
        Op.ALL_TO_ALL: _exchanged,
        Op.GATHER: _gathered,
        Op.SCATTER: _scattered,
    }
    if call.op not in makers:
        raise ValueError(f"{call.op.name} is not for a communicator")
    return makers[call.op](call, own, rank_of=rank_of)


def _reduced(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    kind = "all_reduce" if call.op is Op.ALL_REDUCE else "reduce"
    root = rank_of[call.root] if call.op is Op.REDUCE else -1
    size = call.element.nbytes
    outputs = call.outputs or call.inputs
    return [
        Step(kind, source, target, nbytes // size, call.element, call.reduction, root)
        for (source, nbytes), (target, _) in zip(call.inputs, outputs, strict=True)
        if nbytes
    ]


def _broadcast(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    spans = call.inputs if own == call.root else call.outputs
    return [
        _sent_to_all(address, address, nbytes=nbytes, root=rank_of[call.root]) for address, nbytes in spans if nbytes
    ]


def _gathered_by_all(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    (source, nbytes), outputs = call.inputs[0], call.outputs
    if _in_line(outputs) and _same_order(rank_of):
        return [Step("all_gather", source, outputs[0][0], nbytes, Element.UINT8)] if nbytes else []
    return [
        _sent_to_all(source if role == own else target, target, nbytes=size, root=rank_of[role])
        for role, (target, size) in enumerate(outputs)
        if size
    ]


def _reduced_and_scattered(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    inputs, (target, _), size = call.inputs, call.outputs[0], call.element.nbytes
    if _in_line(inputs) and _same_order(rank_of):
        amount = inputs[0][1] // size
        kind = "reduce_scatter"
        return [Step(kind, inputs[0][0], target, amount, call.element, call.reduction)] if amount else []
    return [
        Step("reduce", source, target, nbytes // size, call.element, call.reduction, rank_of[role])
        for role, (source, nbytes) in enumerate(inputs)
        if nbytes
    ]


def _exchanged(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    return _messages(call.inputs, call.outputs, rank_of=rank_of)


def _gathered(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    address, nbytes = call.inputs[0]
    sends = [_message("send", address, nbytes=nbytes, peer=rank_of[call.root])] if nbytes else []
    return sends + _messages((), call.outputs, rank_of=rank_of)


def _scattered(call: Call, own: int, *, rank_of: dict[int, int]) -> list[Step]:
    address, nbytes = call.outputs[0]
    receives = [_message("recv", address, nbytes=nbytes, peer=rank_of[call.root])] if nbytes else []
    return _messages(call.inputs, (), rank_of=rank_of) + receives


def _messages(inputs: Sequence[_Span], outputs: Sequence[_Span], *, rank_of: dict[int, int]) -> list[Step]:
    """Part i of `inputs` to the role i, part i of `outputs` from it."""
    return [
        _message(kind, address, nbytes=nbytes, peer=rank_of[role])
        for kind, spans in (("send", inputs), ("recv", outputs))
        for role, (address, nbytes) in enumerate(spans)
        if nbytes
    ]


def _message(kind: str, address: int, *, nbytes: int, peer: int) -> Step:
    return Step(kind, address, address, nbytes, Element.UINT8, peer=peer)


def _sent_to_all(source: int, target: int, *, nbytes: int, root: int) -> Step:
    return Step("broadcast", source, target, nbytes, Element.UINT8, peer=root)


def _in_line(spans: Sequence[_Span]) -> bool:
    """Whether the spans lie one behind the other and have one size."""
    first, nbytes = spans[0]
    return all(span == (first + nbytes * number, nbytes) for number, span in enumerate(spans))


def _same_order(rank_of: dict[int, int]) -> bool:
    return all(role == rank for role, rank in rank_of.items())
