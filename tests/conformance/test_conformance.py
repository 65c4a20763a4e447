"""Four processes on keepstep and on Gloo compute the same, over every transport with the same bits (G-3)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from operations import COMPARED, OURS
from training_runs import RUNS

HERE = Path(__file__).parent
KEEPSTEP = ("shared", "tcp", "mixed")
Results = Path  # the folder with what each rank wrote


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Where the four ranks of a variant wrote what they computed; each variant runs once."""
    done: dict[str, Path] = {}

    def of(variant: str) -> Results:
        if variant not in done:
            scratch = tmp_path_factory.mktemp(variant)
            command = [sys.executable, str(HERE / "job.py"), variant, str(scratch)]
            with (scratch / "output").open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, timeout=200, check=False, stdout=output, stderr=output)
            done[variant] = scratch
        return done[variant]

    return of


def check_finished(found: Results, name: str) -> list[object]:
    files = [found / f"{rank}.{name}" for rank in range(4)]
    for file in files:
        if not file.exists():
            pytest.fail(f"{file.name} is missing; output: {(found / 'output').read_text(errors='replace')[-3000:]}")
    outcomes = [torch.load(file, weights_only=False) for file in files]
    for rank, (state, value) in enumerate(outcomes):
        if state != "ok":
            pytest.fail(f"rank {rank}: {value}")
    return [value for _, value in outcomes]


def check_equal(one: object, other: object, *, exact: bool) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert one.dtype == other.dtype
        if exact:
            assert torch.equal(one, other)
        else:
            short = one.element_size() < 4  # sums of four in another order, rounded to 8 bits after every addition
            torch.testing.assert_close(one, other, rtol=2e-2 if short else 1e-4, atol=0.1 if short else 1e-5)
    elif isinstance(one, list):
        assert isinstance(other, list)
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            check_equal(left, right, exact=exact)
    else:
        assert one == other


@pytest.mark.parametrize("name", [*COMPARED, *RUNS])
def test_keepstep_computes_what_gloo_computes(results: Callable[[str], Results], name: str) -> None:
    ours, theirs = check_finished(results("shared"), name), check_finished(results("gloo"), name)
    for one, other in zip(ours, theirs, strict=True):
        check_equal(one, other, exact=False)


@pytest.mark.parametrize("name", list(OURS))
def test_keepstep_computes_what_gloo_does_not_take(results: Callable[[str], Results], name: str) -> None:
    assert len(check_finished(results("shared"), name)) == 4


@pytest.mark.parametrize("variant", ["tcp", "mixed"])
@pytest.mark.parametrize("name", [*COMPARED, *OURS, *RUNS])
def test_every_transport_gives_the_same_bits(results: Callable[[str], Results], name: str, variant: str) -> None:
    shared, other = check_finished(results("shared"), name), check_finished(results(variant), name)
    check_equal(shared, other, exact=True)


def test_all_ranks_hold_the_same_bits(results: Callable[[str], Results]) -> None:
    first, *others = check_finished(results("shared"), "all_reduce_order")
    for other in others:
        check_equal(first, other, exact=True)
