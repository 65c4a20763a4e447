"""Which results of a joiner's set-up are guesses: the script asked other members for a value, and nobody answered.

What torch's own wrappers (DDP, FSDP) move is left out: it is tracked state, which the joiner takes over afterwards.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import FrameType

import torch

from keepstep.training.script_frames import of_library, script_frame

__all__ = ["Guesses"]

_log = logging.getLogger("keepstep")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
_FRONT = tuple(
    os.path.join(_TORCH, "distributed", *name.split("/"))
    for name in (
        "distributed_c10d.py",
        "_functional_collectives.py",
        "_functional_collectives_impl.py",
        "nn/functional.py",
    )
)
"""Where the functions are that scripts call."""

_BETWEEN = (_OWN, *(os.path.join(_TORCH, name) for name in ("_ops.py", "_compile.py", "_library", "autograd", "utils")))
_LOGGER = os.path.join(_TORCH, "distributed", "c10d_logger.py")
_MOST_NAMED = 5


class Guesses:
    """Of one joiner, in its set-up."""

    def __init__(self) -> None:
        self._calls: dict[str, None] = {}

    def note(self, op: str) -> None:
        """A result of the collective `op` is a guess; its caller is looked for on the stack."""
        frame, name = _caller(sys._getframe(1))
        if frame is None or frame.f_code.co_filename.startswith(_TORCH):
            return
        frame = script_frame(frame) or frame
        place = os.path.relpath(frame.f_code.co_filename)
        self._calls[f"{name or op} at {place}:{frame.f_lineno}"] = None

    @property
    def calls(self) -> tuple[str, ...]:
        """Each call with its line, once."""
        return tuple(self._calls)

    def tell(self, rank: int) -> None:
        """One line, if there are any."""
        if not self._calls:
            return
        named = "; ".join(self.calls[:_MOST_NAMED])
        more = f"; and {len(self._calls) - _MOST_NAMED} more" if len(self._calls) > _MOST_NAMED else ""
        _log.warning(
            "keepstep: rank %d is set up without the others, and these calls of the script got a guess in place of "
            "their values: %s%s -> read such values from a file or the command line, or track what is made of them "
            "(job.track(extra=...))",
            rank,
            named,
            more,
        )


def _caller(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Who called a function of torch.distributed, and that function's name."""
    name = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_FRONT):
            name = frame.f_code.co_name
        elif not file.startswith((_LOGGER, *_BETWEEN)) and not of_library(frame.f_code):
            break
        frame = frame.f_back
    return frame, name
