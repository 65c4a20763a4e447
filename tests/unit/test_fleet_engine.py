"""Parts of a fleet: every attempt is in one of them, and Ray tasks give what this process gives."""

from __future__ import annotations

import numpy as np
import pytest
from fleet_data import fleet_of
from fleet_log import write_log

from keepstep.service.fleet_engine import each, run_parts
from keepstep.store.fleet_tables import FleetStore


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, attempts=4000, rng=np.random.default_rng(3))
    fleet_of(folder / "fleet", *[folder / name for name in ("sacct.txt", "health.jsonl", "events.txt")])
    return folder / "fleet"


def sums(directory, part):
    """Attempts and GPU-seconds of a part."""
    number, of = part
    table = FleetStore(directory).part(number, of=of, columns=["run_id", "gpus", "start", "last_seen"])
    held = (table["last_seen"].to_numpy() - table["start"].to_numpy()).astype("int64")
    return table.num_rows, int((held * table["gpus"].to_numpy()).sum())


def test_every_attempt_is_in_one_part(directory):
    store = FleetStore(directory)
    found = each(sums, [(number, 5) for number in range(5)], directory=directory)
    assert sum(rows for rows, _ in found) == store.rows("attempts")
    assert each(sums, run_parts(directory), directory=directory) == [tuple(map(sum, zip(*found, strict=True)))]


def test_a_run_is_in_one_part_only(directory):
    store = FleetStore(directory)
    runs = [set(store.part(number, of=3, columns=["run_id"])["run_id"].to_pylist()) for number in range(3)]
    assert not (runs[0] & runs[1] or runs[0] & runs[2] or runs[1] & runs[2])


@pytest.mark.long
def test_ray_tasks_give_the_same(directory):
    pytest.importorskip("ray")

    def counted(folder, part):  # Ray carries a function of a test by value
        return FleetStore(folder).part(part[0], of=part[1], columns=["run_id"]).num_rows

    parts = [(number, 3) for number in range(3)]
    assert each(counted, parts, directory=directory, engine="ray") == each(counted, parts, directory=directory)
