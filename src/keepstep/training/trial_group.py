"""The process group of a trial: every call is written down and answered at once, without anybody else."""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from keepstep.records.trial import CallKept, WaitKept
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.fabric import Mode
from keepstep.training.plane import Call, Element, Op
from keepstep.training.tensor_calls import Prepared
from keepstep.training.trial_answers import Answers
from keepstep.training.trial_notes import TrialNotes
from keepstep.training.work import DoneWork

__all__ = ["NoFabric", "TrialGroup", "TrialWork"]

_REDUCED = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
_ROOTED = (Op.REDUCE, Op.BROADCAST, Op.GATHER, Op.SCATTER)
_PAIRED = (Op.SEND, Op.RECV)
_WHOLE = (Element.UINT8, Element.INT8, Element.INT16, Element.INT32, Element.INT64)
_FEW_BYTES = 512
_MOST_SHAPES = 4


class NoFabric:
    """What a group asks of a fabric, where there is none: every collective is answered by the member itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.mode = Mode.LOCAL
        self.protected = False
        self.drills = None

    def close_group(self, group: str) -> None:
        """Nothing to close."""


class TrialWork(DoneWork):
    """A call that is over; that somebody waits for it is written down."""

    def __init__(self, result: object, waited: Callable[[], None]) -> None:
        super().__init__(result)
        self._waited = waited

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True, at once."""
        self._waited()
        return True


class TrialGroup(KeepstepGroup):
    """A group of global `ranks`, the `number`-th that this process made."""

    numbers = itertools.count()

    def __init__(
        self, notes: TrialNotes, answers: Answers, *, rank: int, ranks: tuple[int, ...], name: str, number: int
    ) -> None:
        fabric: Any = NoFabric(rank)
        super().__init__(fabric, name, ranks=ranks, timeout=timedelta(minutes=30), on_shutdown=lambda: None)
        self._notes = notes
        self._answers = answers
        self.number = number

    def _submit(self, calls: Sequence[Call], prepared: Prepared, *opts: object) -> DoneWork:  # type: ignore[override]
        notes = self._notes
        kept = self._kept(calls, prepared)
        notes.keep(kept)
        where, needed = f"{notes.place(kept.site)} {kept.op}", notes.inside("object")
        for call in calls:
            self._answers.fill(call, self._own, ranks=self._ranks, where=where, needed=needed)
        prepared.finish()
        return TrialWork(prepared.result, lambda: notes.keep(WaitKept(kept.number)))

    def _kept(self, calls: Sequence[Call], prepared: Prepared) -> CallKept:
        notes, first = self._notes, calls[0]
        inputs = [span for call in calls for span in call.inputs]
        outputs = [span for call in calls for span in call.outputs]
        parts = {nbytes for _, nbytes in (*inputs, *outputs)} if first.op is Op.ALL_TO_ALL else {0}
        ends = {nbytes for call in calls[:1] for _, nbytes in (call.outputs if first.op is Op.ALL_GATHER else ())}
        even = len(parts) == 1 and len(ends) < 2
        return CallKept(
            number=next(self.numbers),
            group=self.number,
            op=int(first.op),
            element=int(first.element),
            reduction=int(first.reduction) if first.op in _REDUCED else -1,
            root=first.root if first.op in _ROOTED else -1,
            peer=self._global(first.peer) if first.op in _PAIRED else -1,
            tag=first.tag if first.op in _PAIRED else 0,
            sent=sum(nbytes for _, nbytes in inputs),
            got=sum(nbytes for _, nbytes in outputs),
            even=even,
            free=not even or notes.inside("object"),
            value=_value(first, inputs),
            shapes=_shapes(prepared.result),
            site=notes.site(),
            step=notes.step,
        )

    def _global(self, place: int) -> int:
        return self._ranks[place] if 0 <= place < self._count else -1


def _value(call: Call, inputs: Sequence[tuple[int, int]]) -> int:
    size = sum(nbytes for _, nbytes in inputs)
    if call.element not in _WHOLE or call.op is Op.BARRIER or not 0 < size <= _FEW_BYTES:
        return 0
    return zlib.crc32(b"".join(ctypes.string_at(address, nbytes) for address, nbytes in inputs)) | 1


def _shapes(result: object) -> tuple[tuple[int, ...], ...]:
    tensors = result if isinstance(result, (list, tuple)) else []
    return tuple(tuple(getattr(tensor, "shape", ())) for tensor in tensors[:_MOST_SHAPES])
