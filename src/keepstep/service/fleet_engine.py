"""Runs one function over all parts of a fleet directory: in this process, or as Ray tasks; the results are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from keepstep.errors import EnvironmentProblem
from keepstep.store.fleet_tables import FleetStore

__all__ = ["Engine", "Part", "each", "run_parts"]

Engine = Literal["local", "ray"]
Part = tuple[int, int]
"""(number, of): the job runs whose id leaves `number` when divided by `of`."""

_ATTEMPTS_A_PART = 2_000_000
_MOST_PARTS = 512
Chosen = TypeVar("Chosen")
Found = TypeVar("Found")


def run_parts(directory: Path) -> list[Part]:
    """Parts of at most two million attempts; every attempt of a job run is in the same part."""
    attempts = FleetStore(directory).rows("attempts")
    of = min(max(-(-attempts // _ATTEMPTS_A_PART), 1), _MOST_PARTS)
    return [(number, of) for number in range(of)]


def each(
    function: Callable[[Path, Chosen], Found],
    parts: Sequence[Chosen],
    *,
    directory: Path,
    engine: Engine = "local",
    say: Callable[[str], None] = lambda _: None,
) -> list[Found]:
    """`function(directory, part)` for every part (what `run_parts` names, or anything made of it), in their order.

    With `ray` each part is a task; `function` must be the function of a module, and `directory` must be reachable by
    every Ray node. `say` is told the progress. Raises EnvironmentProblem if Ray is not installed.
    """
    if engine == "local":
        found = []
        for number, part in enumerate(parts, 1):
            say(f"part {number} of {len(parts)}")
            found.append(function(directory, part))
        return found
    try:
        import ray
    except ImportError as error:
        raise EnvironmentProblem("ray is not installed", remedy="pip install 'keepstep[ray]'") from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        task = ray.remote(num_cpus=1)(function)
        say(f"{len(parts)} parts as Ray tasks")
        results: list[Found] = ray.get([task.remote(directory.resolve(), part) for part in parts])
        return results
    finally:
        if mine:
            ray.shutdown()
