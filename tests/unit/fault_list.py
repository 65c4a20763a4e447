"""The public fault trace of 400 nodes as arrays, for tests: days from one origin."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import numpy as np

from keepstep.fleet.episodes import Faults

NODES, HORIZON, LAST_DAY = 400, 348.0, 349.0
TRACE = Path(__file__).resolve().parents[1] / "data" / "infinitehbd_compact" / "faults.csv"


@functools.cache
def rows() -> list[dict[str, str]]:
    with TRACE.open(newline="") as file:
        return list(csv.DictReader(file))


def faults(chosen=lambda row: True) -> Faults:
    taken = [row for row in rows() if chosen(row)]
    columns = (
        [kind(row[name]) for row in taken] for name, kind in (("node", int), ("start_day", float), ("end_day", float))
    )
    node, start, end = map(np.array, columns)
    return Faults.of(node, start, end=end)
