"""What only this rank knows: its random generators, how far it has read its data, its extra objects and own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from keepstep.errors import StateError, TornRecord
from keepstep.training.extras import Extras
from keepstep.training.own_buffers import OwnBuffers
from keepstep.training.rng import capture_rng, restore_rng
from keepstep.training.tree import dumps
from keepstep.training.treereader import loads

__all__ = ["Stream", "apply", "capture", "within_reach"]


_HEAD_BYTES = 32


class Stream(Protocol):
    """A data stream that can say where it stands and go there (`Batches`)."""

    def position(self, *, counting: bool = False) -> dict[str, Any]:
        """Where the stream stood at the last step boundary, or would stand if the step under way counted."""

    def reaches(self, position: dict[str, Any]) -> bool:
        """Whether it can go there."""

    def seek(self, position: dict[str, Any]) -> None:
        """Go there."""


def capture(
    streams: Sequence[Stream] = (),
    *,
    counting: bool = False,
    version: int = 0,
    extras: Extras | None = None,
    buffers: OwnBuffers | None = None,
    most: int | None = None,
) -> bytes:
    """The private state now; to be taken at a step boundary. About 8 KB, up to 8 KB more for each stream, and the own
    values of `extras` and `buffers` as far as all of it fits in `most` bytes. `version`: updates it is the state after.

    With `counting` it is taken inside a step, as it will be if that step counts.
    """
    own: dict[str, Any] = {"rng": capture_rng(), "streams": [stream.position(counting=counting) for stream in streams]}
    if extras:
        own["extra"] = extras.capture(version, counting=counting, most=_left(own, most))
    if buffers:
        own["buffers"] = buffers.capture(_left(own, most))
    return dumps(own)


def apply(
    data: bytes,
    streams: Sequence[Stream] = (),
    *,
    extras: Extras | None = None,
    buffers: OwnBuffers | None = None,
) -> None:
    """Become the rank that captured `data`: `extras` and `buffers`, which came with the state, get its values, the
    streams go to their positions, then the generators are set.

    Empty data (unknown) changes nothing. Raises TornRecord for damaged data, StateError for other streams or values
    that were too large.
    """
    if not data:
        return
    state = _decoded(data)
    if len(state["streams"]) != len(streams):
        raise StateError(
            f"the rank read {len(state['streams'])} data streams, this process has {len(streams)}",
            remedy="call job.data() for the same loaders in the same order on every rank",
        )
    if extras is not None and "extra" in state:
        extras.become(state["extra"])
    if buffers is not None:
        buffers.become(state.get("buffers", {}))
    for stream, position in zip(streams, state["streams"], strict=True):
        stream.seek(position)
    restore_rng(state["rng"])


def within_reach(data: bytes, streams: Sequence[Stream] = ()) -> bool:
    """Whether all `streams` can go where they were when `data` was captured. Raises TornRecord for damaged data."""
    if not (data and streams):
        return True
    positions = _decoded(data)["streams"]
    return all(stream.reaches(position) for stream, position in zip(streams, positions, strict=False))


def _left(own: dict[str, Any], most: int | None) -> int | None:
    """What is left of `most` bytes."""
    return None if most is None else most - len(dumps(own)) - _HEAD_BYTES


def _decoded(data: bytes) -> dict[str, Any]:
    state = loads(data)
    if not (isinstance(state, dict) and isinstance(state.get("streams"), list) and isinstance(state.get("rng"), dict)):
        raise TornRecord("not the private state of a rank")
    return state
