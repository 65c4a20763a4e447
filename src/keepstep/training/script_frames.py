"""Which lines are the script's, or of what lies beside it: neither Python's, nor installed, nor keepstep's."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["above_library", "of_library", "of_script", "script_frame"]

_NAMES = ("stdlib", "platstdlib")
_INSTALLED = ("purelib", "platlib")


def _folders(*paths: str | None) -> tuple[str, ...]:
    named = [Path(path) for path in paths if path]
    return tuple({str(path) + os.sep for one in named for path in (one, one.resolve())})


_LIBRARY = ("<", str(Path(os.__file__).parent) + os.sep, *_folders(*map(sysconfig.get_path, _NAMES)))
_OTHERS = _folders(
    str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), *map(sysconfig.get_path, _INSTALLED)
)


@functools.lru_cache(maxsize=1 << 16)
def _kind(file: str) -> str:
    place = file if file.startswith("<") else os.path.abspath(file)
    if place.startswith(_OTHERS):
        return "other"
    return "library" if place.startswith(_LIBRARY) else "script"


def of_script(code: CodeType) -> bool:
    """Whether the script, or a module beside it, says this."""
    return _kind(code.co_filename) == "script"


def of_library(code: CodeType) -> bool:
    """Whether Python's own library says this."""
    return _kind(code.co_filename) == "library"


def script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the script, from `frame` on outwards."""
    while frame is not None and not of_script(frame.f_code):
        frame = frame.f_back
    return frame


def above_library(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` on outwards, that is not of Python's own library."""
    while frame is not None and of_library(frame.f_code):
        frame = frame.f_back
    return frame
