"""Rows of job runs from lives that are incomplete, in parts, and larger than 64 bits hold."""

import numpy as np
import pyarrow as pa

from keepstep.fleet.run_rows import OF_FIRST, run_rows

TIME = pa.timestamp("us")


def lives_of(rows):
    kinds = {name: pa.int64() for name in ("attempt_id", "run_id", "life", "gpus", "node_count")}
    kinds |= dict.fromkeys(("came", "start", "end", "until"), TIME) | dict.fromkeys(
        ("failed", "independent"), pa.bool_()
    )
    kinds |= dict.fromkeys(("how", "state"), pa.string())
    return pa.table({name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()})


def life(attempt, run, number, **more):
    return {
        "attempt_id": attempt,
        "run_id": run,
        "life": number,
        "failed": False,
        "independent": False,
        "how": "",
    } | more


def found(rows, loops=()):
    names = pa.table(
        {"attempt_id": [row["attempt_id"] for row in rows[::-1]]} | dict.fromkeys(OF_FIRST, ["n"] * len(rows))
    )
    return run_rows(lives_of(rows), names, loops=np.array(loops, np.int64)).to_pylist()


def test_parts_of_one_life_add_up_and_the_largest_life_counts():
    rows = [
        life(1, 1, 0, gpus=8, node_count=1, state="NODE_FAIL", came=0, start=10, end=20, until=20, failed=True),
        life(2, 1, 1, gpus=16, node_count=2, state="RESIZING", how="requeue", came=20, start=30, end=40, until=40),
        life(3, 1, 1, gpus=8, node_count=None, state="COMPLETED", how="part", came=20, start=30, end=40, until=40),
        life(4, 1, 2, gpus=None, state="RUNNING", how="requeue", came=41, start=50, until=55),
    ]
    (run,) = found(rows, loops=[1])
    assert (run["gpus"], run["node_count"], run["attempts"], run["failures"]) == (24, 2, 4, 1)
    assert (run["requeues"], run["state"], run["end"], run["crash_loop"]) == (2, "RUNNING", None, True)
    assert (run["allocated_us"], run["gpu_us"]) == (35, 10 * 8 + 10 * 16 + 10 * 8)


def test_nothing_known_is_null_and_too_much_is_the_most():
    rows = [
        life(1, 1, 0, state="PENDING"),
        life(2, 2, 0, state="COMPLETED", gpus=2**40, start=0, end=2**40, until=2**40),
    ]
    waiting, huge = found(rows)
    assert [waiting[name] for name in ("gpus", "gpu_us", "submit", "start", "end")] == [None] * 5
    assert huge["gpu_us"] == 2**63 - 1


def test_no_attempts_make_no_runs():
    assert found([]) == []
