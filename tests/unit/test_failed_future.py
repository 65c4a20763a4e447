"""Futures of failed collectives: Python gets the error itself, C++ an error with its words."""

from __future__ import annotations

import pytest
import torch
from torch._jit_internal import _extract_tensors
from torch.distributed import DistBackendError

from keepstep.training.failed_future import fail, words_of

ERROR = DistBackendError("rank 2 is gone")


def test_python_gets_the_error_itself() -> None:
    future: torch.futures.Future[object] = torch.futures.Future()
    after = future.then(lambda done: done.value())
    fail(future, ERROR)
    with pytest.raises(DistBackendError, match="rank 2 is gone"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        after.wait()


def test_who_looks_for_tensors_in_it_gets_the_error() -> None:
    """As C++ does, which takes the first of the tensors it finds."""
    future: torch.futures.Future[object] = torch.futures.Future()
    fail(future, ERROR)
    future._set_unwrap_func(lambda result: result)
    with pytest.raises(DistBackendError, match="rank 2 is gone"):
        _extract_tensors(future.wait())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError(
                "Cannot extract tensors from value: DistBackendError: rank 2 is gone\n\nAt:\n  a.py(3): step\n"
            ),
            "DistBackendError: rank 2 is gone",
        ),
        (ValueError("bad\n\nAt:\nhome"), "ValueError: bad\n\nAt:\nhome"),
    ],
)
def test_the_words_of_an_error_that_came_through_cpp(error: Exception, words: str) -> None:
    assert words_of(error) == words
