"""Futures of collectives that failed: Python callers get the error, C++ callers an exception with its text.

`set_exception` of torch makes the error a result that only Python tells from one. C++ code (DistributedDataParallel)
takes the first of the tensors in a result; in an error there are none, and the process ends by SIGSEGV.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__all__ = ["fail", "words_of"]

_THROUGH_CPP = "RuntimeError: Cannot extract tensors from value: "
_FRAMES = "\n\nAt:\n"


class _Failed:
    """What stands in the future. C++ looks for tensors by pickling it, which raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error


def fail(future: torch.futures.Future[object], error: Exception) -> None:
    """Completes `future` with `error`."""

    def unwrap(result: object) -> NoReturn:
        raise error

    future._set_unwrap_func(unwrap)
    future.set_result(_Failed(error))


def words_of(error: Exception) -> str:
    """Type and text of an error; where it came through C++, of the one that failed the future."""
    words = f"{type(error).__name__}: {error}"
    return words.removeprefix(_THROUGH_CPP).partition(_FRAMES)[0] if words.startswith(_THROUGH_CPP) else words
