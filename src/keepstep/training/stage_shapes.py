"""What a joiner must know of the stages beside its own before it can rehearse: the shapes of what they send.

torch finds them with messages between all stages in the first step. A joiner comes later, so it asks the members that
hold the neighbouring stages, over a connection of its own: one JSON request, one JSON answer, both bounded.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from keepstep.errors import PeerLost, StateError, TornRecord
from keepstep.training.fabric import Fabric
from keepstep.training.statewire import receive_exactly, set_timeout

__all__ = ["StageAsked", "StageShapes", "ask_shapes", "shapes_of", "tell_shapes", "tensors_of"]

_TIMEOUT_S = 5.0
_MOST_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")
_Sizes = Annotated[tuple[int, ...], Meta(max_length=64)]


class StageAsked(msgspec.Struct, frozen=True):
    """Stage `number` of `count` in the process group `group` of torch."""

    group: str
    count: int
    number: int


class _Shape(msgspec.Struct, frozen=True):
    """One dense tensor; None in a list stands for a gradient that there is not."""

    sizes: _Sizes
    strides: _Sizes
    dtype: Annotated[str, Meta(max_length=32)]
    needs_gradient: bool


class StageShapes(msgspec.Struct, frozen=True):
    """What a stage sends: `outputs` to the next one, `input_grads` to the one before; None where it is not known."""

    outputs: Annotated[list[_Shape | None], Meta(max_length=256)] | None = None
    input_grads: Annotated[list[_Shape | None], Meta(max_length=256)] | None = None


def shapes_of(metas: Sequence[Any] | None) -> list[_Shape | None] | None:
    """torch's metadata of tensors as plain values. Raises StateError for distributed tensors."""
    if metas is None:
        return None
    shapes: list[_Shape | None] = []
    for meta in metas:
        if meta is not None and hasattr(meta, "placements"):
            raise StateError(
                "distributed tensors go from stage to stage: a joiner cannot ask for their shapes",
                remedy="give PipelineStage its input_args, output_args and their gradients",
            )
        shapes.append(None if meta is None else _shape(meta))
    return shapes


def _shape(meta: Any) -> _Shape:
    return _Shape(tuple(meta.shape), tuple(meta.stride), str(meta.dtype).partition(".")[2], bool(meta.requires_grad))


def tensors_of(shapes: Sequence[_Shape | None] | None) -> tuple[Any, ...]:
    """The other way round. Raises StateError where a shape is not known or has an unknown type of number."""
    from torch.distributed.pipelining._utils import _TensorMeta

    if shapes is None:
        raise StateError("the neighbouring stage does not know its shapes yet")
    metas: list[Any] = []
    for one in shapes:
        dtype = getattr(torch, one.dtype, None) if one is not None else None
        if one is None:
            metas.append(None)
        elif isinstance(dtype, torch.dtype):
            metas.append(_TensorMeta(torch.Size(one.sizes), tuple(one.strides), dtype, one.needs_gradient))
        else:
            raise StateError(f"the neighbouring stage sends numbers of the unknown type {one.dtype!r}")
    return tuple(metas)


def tell_shapes(sock: socket.socket, find: Callable[[StageAsked], StageShapes]) -> None:
    """Answer one request on an authenticated connection, then close it. Nonsense gets no answer."""
    with sock:
        try:
            set_timeout(sock, _TIMEOUT_S)
            asked = msgspec.json.decode(_receive(sock), type=StageAsked)
            _send(sock, find(asked))
        except (msgspec.MsgspecError, TornRecord, PeerLost, OSError):
            return


def ask_shapes(fabric: Fabric, rank: int, *, asked: StageAsked) -> StageShapes:
    """What the member with the global `rank` knows of a stage that it holds.

    Raises StateError for an answer that is none, PeerLost or OSError where nobody answers.
    """
    address = fabric.directory.resolve(rank, _TIMEOUT_S)
    with fabric.dial(address, "stage", timeout_s=_TIMEOUT_S) as sock:
        set_timeout(sock, _TIMEOUT_S)
        _send(sock, asked)
        try:
            return msgspec.json.decode(_receive(sock), type=StageShapes)
        except (msgspec.MsgspecError, TornRecord) as error:
            raise StateError(f"rank {rank} gave no shapes of stage {asked.number}: {error}") from error


def _send(sock: socket.socket, message: StageAsked | StageShapes) -> None:
    data = msgspec.json.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if length > _MOST_BYTES:
        raise TornRecord(f"a message of {length} bytes about a stage, at most {_MOST_BYTES} are read")
    return bytes(receive_exactly(sock, length))
