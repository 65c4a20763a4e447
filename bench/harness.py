"""What all benchmarks share: rounds of interleaved cases, median and spread, one output as text or JSON.

A benchmark compares things inside one run, case after case in every round, because only ratios of one run mean
something on a busy machine. Its JSON is `{"benchmark", "results": [...], "machine", "versions"}`; every result has
`name, value, unit, target, met, spread`, where `spread` is `[lowest, highest]` of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

__all__ = [
    "Result",
    "Spread",
    "judge",
    "machine",
    "options",
    "ratios",
    "report",
    "rounds",
    "summarise",
    "versions",
]


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some repetitions, in the unit of the values."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One line of a benchmark. `target` is None where there is none; then `met` is True."""

    name: str
    value: float
    unit: str
    target: float | None
    met: bool
    spread: tuple[float, float]


def summarise(values: Sequence[float]) -> Spread:
    """Median and range of `values` (at least one)."""
    return Spread(statistics.median(values), min(values), max(values))


def rounds(cases: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Runs every case once per round, `count` rounds; odd rounds run them in reverse order. Values by case name."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(count):
        names = list(cases) if number % 2 == 0 else list(reversed(cases))
        for name in names:
            values[name].append(cases[name]())
    return values


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """`above / below`, round by round: both of a round ran right after each other."""
    return [a / b for a, b in zip(above, below, strict=True)]


def judge(
    name: str, values: Sequence[float], *, unit: str, at_least: float | None = None, at_most: float | None = None
) -> Result:
    """The result of repeated `values`; its value is the median, judged against one of the two limits."""
    spread = summarise(values)
    target = at_least if at_least is not None else at_most
    met = (at_least is None or spread.median >= at_least) and (at_most is None or spread.median <= at_most)
    return Result(name, spread.median, unit, target, met, (spread.low, spread.high))


def machine() -> dict[str, str | int | float]:
    """What the numbers were measured on."""
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of python, keepstep, torch and further `packages`; "none" for what is not installed."""
    found = {"python": platform.python_version()}
    for name in ("keepstep", "torch", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def options(description: str) -> argparse.ArgumentParser:
    """The parser every benchmark starts from: `--quick` and `--format`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repetitions: under 45 s, numbers less sure")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def _line(result: Result, width: int) -> str:
    target = "" if result.target is None else f"  target {result.target:g} {'met' if result.met else 'MISSED'}"
    low, high = result.spread
    return f"{result.name:{width}}  {result.value:10.4g} {result.unit:6} ({low:.4g} to {high:.4g}){target}"


def report(benchmark: str, results: Sequence[Result], style: str) -> None:
    """Prints all results on standard output as `text` or `json`."""
    if style == "json":
        body = {
            "benchmark": benchmark,
            "results": [asdict(result) for result in results],
            "machine": machine(),
            "versions": versions(),
        }
        sys.stdout.write(json.dumps(body) + "\n")
        return
    width = max((len(result.name) for result in results), default=0)
    lines = [f"{benchmark}: median (lowest to highest)"]
    lines += [_line(result, width) for result in results]
    lines += [" ".join(f"{key}={value}" for key, value in {**machine(), **versions()}.items())]
    sys.stdout.write("\n".join(lines) + "\n")
