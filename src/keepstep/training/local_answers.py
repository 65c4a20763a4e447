"""Collectives answered by one member alone, as if all others had given the same as this one.

Used while a joiner runs its set-up: broadcast leaves the data, all_gather repeats the own input, reductions leave the
input, reduce_scatter takes the own part, all_to_all copies the own input where sizes allow, a receive gives zeros.
"""

from __future__ import annotations

import ctypes

from keepstep.training.plane import Call, Op

__all__ = ["answer_locally"]

_Span = tuple[int, int]


def answer_locally(call: Call, rank: int) -> None:
    """Fills the outputs of `call` for the member `rank` (group rank) of its group."""
    if call.op in (Op.BARRIER, Op.BROADCAST, Op.SEND):
        return
    if call.op is Op.RECV:
        for address, nbytes in call.outputs:
            ctypes.memset(address, 0, nbytes)
        return
    for number, output in enumerate(call.outputs):
        _copy(output, _source(call, number, rank=rank))


def _source(call: Call, number: int, *, rank: int) -> _Span:
    if call.op in (Op.ALL_GATHER, Op.GATHER):
        return call.inputs[0]
    if call.op is Op.REDUCE_SCATTER or call.op is Op.SCATTER:
        return call.inputs[rank] if call.inputs else (0, 0)
    return call.inputs[number] if number < len(call.inputs) else (0, 0)


def _copy(output: _Span, source: _Span) -> None:
    if output == source:
        return
    nbytes = min(output[1], source[1])
    if nbytes:
        ctypes.memmove(output[0], source[0], nbytes)
    if output[1] > nbytes:
        ctypes.memset(output[0] + nbytes, 0, output[1] - nbytes)
