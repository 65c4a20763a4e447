"""Records what the collectives of a member's set-up and first steps give, for standbys that rehearse its role.

Of every output the first 64 KiB are kept at most, and a few MiB in all; payloads of plain bytes are not kept (they may
be pickled objects). After the last recorded step nothing of it is left on the way of a collective.
"""

from __future__ import annotations

import hashlib
import itertools
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from keepstep.records.step_recording import HEAD_BYTES, MAX_CALLS, RecordedCall
from keepstep.training.memory import head_of
from keepstep.training.plane import Call, Element, Op
from keepstep.training.sharding import local_of
from keepstep.training.tensor_calls import Prepared

__all__ = ["RECORDED_STEPS", "GroupPlace", "Tape", "TapedRole", "peak_memory_bytes"]

GroupPlace = tuple[str, int, int]
"""A group's name, the own number in it, and how many members it has."""

RECORDED_STEPS = 2
"""The set-up and this many steps: DDP settles its buckets in the first, the second is like all that follow."""

_MOST_BYTES = 6 * 1024 * 1024
_SILENT = (Op.SEND, Op.BARRIER)


class _Place:
    """One call on the tape; its heads come when the call is done."""

    __slots__ = ("call", "group", "heads", "own", "size", "step")

    def __init__(self, group: GroupPlace, call: Call, *, step: int) -> None:
        self.group, self.own, self.size = group
        self.call = call
        self.step = step
        self.heads: tuple[bytes, ...] = ()


class TapedRole:
    """What a member can say of its role after the first steps: the `name` of its kind and its recorded calls."""

    def __init__(self, name: str, calls: tuple[RecordedCall, ...]) -> None:
        self.name = name
        self.calls = calls

    @property
    def nbytes(self) -> int:
        """Bytes of all heads."""
        return sum(len(head) for call in self.calls for head in call.heads)


class Tape:
    """Runs from `join()` to the end of the second step. `now` gives monotonic seconds, for its own cost."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.cost_s = 0.0
        self._now = now
        self._places: list[_Place] = []
        self._step = -1
        self._kept = 0
        self._begun = 0
        self._bytes = 0

    def note(self, calls: Sequence[Call], prepared: Prepared, *, group: GroupPlace) -> None:
        """Calls of one collective of `group` are about to be submitted."""
        began = self._now()
        places = [_Place(group, call, step=self._step) for call in calls]
        if len(self._places) + len(places) <= MAX_CALLS:
            self._places += places
            prepared.when_done = partial(self._done, places)
        self.cost_s += self._now() - began

    def _done(self, places: Iterable[_Place]) -> None:
        """The outputs are there, and still where the calls said."""
        began = self._now()
        for place in places:
            call = place.call
            if call.op not in _SILENT and call.element is not Element.UINT8:
                place.heads = tuple(self._head(address, nbytes) for address, nbytes in call.outputs)
        self.cost_s += self._now() - began

    def _head(self, address: int, nbytes: int) -> bytes:
        nbytes = min(nbytes, HEAD_BYTES, max(0, _MOST_BYTES - self._bytes))
        self._bytes += nbytes
        return head_of(address, nbytes)

    def begin_step(self) -> None:
        """A step begins, or begins again: what an aborted one left is dropped."""
        if self._step >= 0 and self._step == self._kept:
            del self._places[self._begun :]
        self._step = self._kept
        self._begun = len(self._places)

    def step_kept(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> TapedRole | None:
        """A step counts. After the last one to record: the role; before, None."""
        self._kept += 1
        if self._kept < RECORDED_STEPS:
            return None
        name = self._kind(parameters, optimizers)
        calls = tuple(_recorded(place) for place in self._places)
        self._places.clear()
        return TapedRole(name, calls)

    def _kind(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> str:
        """Equal for ranks whose parameters have equal shapes and whose last step made equal collectives."""
        shapes = Counter((tuple(local_of(one).shape), str(one.dtype)) for one in parameters)
        last = (place for place in self._places if place.step == self._step)
        made = Counter((int(p.call.op), p.size, _towards(p)) for p in last)
        parts = (sorted(shapes.items()), sorted(made.items()), sorted(type(one).__name__ for one in optimizers))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _towards(place: _Place) -> int:
    """Whether a message from one to one goes to, or comes from, a higher number (1) or a lower one (-1); else 0.

    So the first stage of a pipeline differs from the last one, and all between look alike.
    """
    if place.call.op not in (Op.SEND, Op.RECV):
        return 0
    return 1 if place.call.peer > place.own else -1


def _recorded(place: _Place) -> RecordedCall:
    call = place.call
    sizes = tuple(nbytes for _, nbytes in call.outputs)
    heads = place.heads if len(place.heads) == len(sizes) else tuple(itertools.repeat(b"", len(sizes)))
    peer = call.peer if call.op in (Op.SEND, Op.RECV) else call.root
    return RecordedCall(place.group, int(call.op), int(call.element), peer, call.tag, sizes, heads)


def peak_memory_bytes() -> int:
    """The most memory this process ever held, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
