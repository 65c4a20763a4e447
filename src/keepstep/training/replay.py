"""Collectives answered from a recording, so that a rehearsal gets the numbers and sizes that a live step gets.

Sends and barriers do nothing. Where nothing fitting was recorded, the answer is that of `local_answers`. Plain bytes
are never in a recording: objects that others would have sent are None (`objects_are_none`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from keepstep.records.step_recording import RecordedCall
from keepstep.training.guesses import Guesses
from keepstep.training.local_answers import answer_locally
from keepstep.training.plane import Call, Element, Op

__all__ = ["Replay", "objects_are_none"]

_LOOK_AHEAD = 32
_MOST_UNSET = 256
_MOST = 1 << 40
_PERSONAL = (Op.RECV, Op.ALL_TO_ALL, Op.SCATTER)
_OF_ONE_RANK = (*_PERSONAL, Op.REDUCE_SCATTER)
_DAMAGED = (
    c10d.pickle.UnpicklingError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    ImportError,
    TypeError,
)


class Replay:
    """Answers from `calls`, kind by kind in their order; when they are used up, from their beginning again.

    `answered` counts calls with a recorded answer, `guessed` those without. `own` is false where another rank of the
    same kind recorded them: then what it alone got is not used, until `end_set_up`.
    """

    def __init__(self, calls: Iterable[RecordedCall] = (), *, own: bool = True) -> None:
        self.answered = 0
        self.guessed = 0
        self.guesses: Guesses | None = Guesses()
        self._own = own
        self._unset: deque[tuple[int, int]] = deque(maxlen=_MOST_UNSET)
        self._queues: dict[tuple[str, int, int, int, int], deque[RecordedCall]] = {}
        for call in calls:
            key = (call.group, call.op, call.element, call.peer, call.tag)
            self._queues.setdefault(key, deque()).append(call)

    def answer(self, call: Call, *, group: str, rank: int) -> None:
        """Fill the outputs of `call`, made by number `rank` of `group`."""
        if call.op in (Op.SEND, Op.BARRIER):
            return
        recorded = self._take(call, group=group)
        usable = self._own or call.op not in _OF_ONE_RANK
        if recorded is not None and usable and _fill(call, recorded):
            self.answered += 1
            return
        self.guessed += 1
        if self.guesses is not None and any(nbytes for _, nbytes in call.outputs):
            self.guesses.note(call.op.name.lower())
        if call.op in (Op.BROADCAST, Op.SCATTER) and call.element is Element.UINT8:
            self._unset.extend(call.outputs)
        if call.op is Op.BROADCAST and call.element is Element.INT64:
            _clamp(call)
        answer_locally(call, rank)

    def end_set_up(self, rank: int) -> None:
        """What `rank` is told from here on is overwritten by the state it takes; what it was told before is not."""
        guesses, self.guesses, self._own = self.guesses, None, True
        if guesses is not None:
            guesses.tell(rank)

    def unset(self, address: int) -> bool:
        """Whether the bytes at `address` should have come from another member, and did not."""
        return any(first <= address < first + nbytes for first, nbytes in self._unset)

    def _take(self, call: Call, *, group: str) -> RecordedCall | None:
        """The next recorded call of this kind, the next one with outputs of equal sizes if there is one soon."""
        peer = call.peer if call.op in (Op.SEND, Op.RECV) else call.root
        queue = self._queues.get((group, int(call.op), int(call.element), peer, call.tag))
        if not queue:
            return None
        sizes = tuple(nbytes for _, nbytes in call.outputs)
        for ahead in range(min(_LOOK_AHEAD, len(queue))):
            if queue[ahead].sizes == sizes:
                queue.rotate(-ahead)
                break
        found = queue[0]
        queue.rotate(-1)
        return found


def _fill(call: Call, recorded: RecordedCall) -> bool:
    """Write what was recorded. False if it does not fit, and nothing was written.

    What one member sends to another depends on the data: there a size that differs, or an output that was kept in
    part, is filled by repeating what there is.
    """
    whole = all(len(head) == size for head, size in zip(recorded.heads, recorded.sizes, strict=True))
    fits = recorded.sizes == tuple(nbytes for _, nbytes in call.outputs)
    if whole and fits:
        for (address, nbytes), head in zip(call.outputs, recorded.heads, strict=True):
            if nbytes:
                ctypes.memmove(address, head, nbytes)
        return bool(call.outputs)
    if call.op not in _PERSONAL:
        return False
    pattern = next((head for head in recorded.heads if head), b"")
    pattern = pattern[: len(pattern) - len(pattern) % call.element.nbytes]
    if not pattern:
        return False
    for number, (address, nbytes) in enumerate(call.outputs):
        own = recorded.heads[number] if number < len(recorded.heads) else b""
        _repeat(own if own and len(own) % call.element.nbytes == 0 else pattern, address, nbytes=nbytes)
    return True


def _clamp(call: Call) -> None:
    """Numbers that another member would have sent may lie in memory that nobody has set: no absurd sizes come of it."""
    for address, nbytes in call.outputs:
        for number in (ctypes.c_int64 * (nbytes // 8)).from_address(address) if nbytes else ():
            if not 0 <= number <= _MOST:
                ctypes.memset(address, 0, nbytes)
                break


def _repeat(pattern: bytes, address: int, *, nbytes: int) -> None:
    written = 0
    while written < nbytes:
        count = min(len(pattern), nbytes - written)
        ctypes.memmove(address + written, pattern, count)
        written += count


@contextlib.contextmanager
def objects_are_none(replay: Replay, *, applies: Callable[[], bool]) -> Iterator[None]:
    """While `applies()`, objects that torch's object collectives would have got from other members are None.

    What they read otherwise was made by this process itself.
    """
    original = c10d._tensor_to_object

    def read(tensor: torch.Tensor, *rest: Any) -> Any:  # its size and the group
        if not applies():
            return original(tensor, *rest)
        if not tensor.numel() or replay.unset(tensor.data_ptr()):
            return None
        try:
            return original(tensor, tensor.numel(), *rest[1:])
        except _DAMAGED:
            return None

    c10d._tensor_to_object = read
    try:
        yield
    finally:
        c10d._tensor_to_object = original
