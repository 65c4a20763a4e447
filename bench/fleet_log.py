"""Writes a simulated fleet's log as its tools would: sacct.txt, health.jsonl, events.txt; and truth.json."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from pyarrow import csv

from keepstep.simulation.simulated_fleet import FleetShape, simulate_fleet
from keepstep.simulation.simulated_sacct import event_lines, health_lines, sacct_tables

FULL_ATTEMPTS, FULL_GPU_HOURS = 4_000_000, 150e6


def write_log(folder: Path, *, attempts: int, rng: np.random.Generator) -> None:
    """Eleven months with about `attempts` attempts and GPU-hours in proportion."""
    shape = FleetShape(attempts=attempts, gpu_hours=FULL_GPU_HOURS * attempts / FULL_ATTEMPTS)
    lives, truth = simulate_fleet(shape, rng)
    with (folder / "sacct.txt").open("wb") as file:
        for number, table in enumerate(sacct_tables(lives)):
            style = csv.WriteOptions(
                include_header=number == 0, delimiter="|", quoting_style="none", quoting_header="none"
            )
            csv.write_csv(table, file, style)
    (folder / "health.jsonl").write_text("\n".join(health_lines(lives, rng)) + "\n")
    (folder / "events.txt").write_text("\n".join(event_lines(lives, rng)) + "\n")
    (folder / "truth.json").write_bytes(msgspec.json.encode(truth))
