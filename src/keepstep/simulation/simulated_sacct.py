"""A simulated fleet as its tools would write it: sacct, sacctmgr's events, health checks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keepstep.simulation.simulated_fleet import Lives

__all__ = ["EPOCH_S", "bad_node", "event_lines", "health_lines", "sacct_tables"]

EPOCH_S = 1_735_689_600
"""The simulated log begins on 2025-01-01 UTC."""
_GPUS_A_NODE = 8
_BATCH = 400_000
_STATES = pa.array(["COMPLETED", "NODE_FAIL", "FAILED", "PREEMPTED", "CANCELLED by 1000", "TIMEOUT", "RUNNING"])
_CHECKS = (
    ("check_gpu_ecc", "XID 95: uncontained ECC error"),
    ("check_ib_link", "mlx5_3 port 1 is down"),
    ("check_gpu_count", "7 GPUs where 8 are expected"),
    ("check_nvlink_status", "XID 74: NVLink error"),
    ("check_fs_mount", "/checkpoints is not mounted"),
)


def _checked(lives: Lives) -> np.ndarray:
    """Which failures a health check saw: 7 of 10, by the number of the row."""
    return (lives.fate == 1) & (np.arange(len(lives.fate)) % 10 < 7)


def _node_lists(lives: Lives, rows: np.ndarray) -> pa.Array:
    """The nodes of each of `rows` as Slurm writes them: those of its lane, but for restarts and preempted jobs."""
    lane, borrow = lives.lane[rows], lives.borrow[rows]
    wide = np.maximum(lives.size[rows] // _GPUS_A_NODE, 1)
    first = np.where(lane >= 0, lives.lane_nodes[np.maximum(lane, 0)], 0)
    pairs, places = np.unique(first * 100_000 + wide, return_inverse=True)
    words = np.array([_own_nodes(int(pair) // 100_000, int(pair) % 100_000) for pair in pairs] or [""], dtype=object)
    lists = words[places]
    for index in np.flatnonzero((lane < 0) | (borrow >= 0)).tolist():
        row = int(rows[index])
        if row in lives.victim_node:
            lists[index] = f"node{lives.victim_node[row]:05d}"
            continue
        taken = lives.restarts.get(int(borrow[index]), [])[: int(wide[index]) - 1]
        own = _own_nodes(int(first[index]), int(wide[index]) - len(taken))
        lists[index] = ",".join([own, *(f"node{node:05d}" for node in taken)])
    return pa.array(lists, pa.string())


def _own_nodes(first: int, wide: int) -> str:
    return f"node{first:05d}" if wide == 1 else f"node[{first:05d}-{first + wide - 1:05d}]"


def _time(seconds: np.ndarray) -> pa.Array:
    moments = pa.array((seconds + EPOCH_S).astype(np.int64)).cast(pa.timestamp("s"))
    return pc.strftime(moments, format="%Y-%m-%dT%H:%M:%S")


def sacct_tables(lives: Lives) -> Iterator[pa.Table]:
    """The rows of `sacct -D -X -P`, by time of submission, in pieces. All columns are text."""
    order = np.argsort(lives.submit, kind="stable")
    work = _work(lives)
    for begin in range(0, len(order), _BATCH):
        yield _table(lives, order[begin : begin + _BATCH], work=work)


def _table(lives: Lives, rows: np.ndarray, *, work: np.ndarray) -> pa.Table:
    fate, size = lives.fate[rows], lives.size[rows]
    width = np.maximum(size // _GPUS_A_NODE, 1)
    checked = _checked(lives)[rows]
    states = np.where(checked, 2, fate)  # a failure that a check saw ends FAILED, the others NODE_FAIL
    job = pa.array(lives.run[rows] + 1000).cast(pa.string())
    work = work[rows]
    gpus = pa.array(size).cast(pa.string())
    nodes = pa.array(width).cast(pa.string())
    cpus = pa.array(size * 12).cast(pa.string())
    tres = pc.binary_join_element_wise("billing=", cpus, ",cpu=", cpus, ",gres/gpu=", gpus, ",mem=64G,node=", nodes, "")
    open_ = fate == 6
    end = pc.if_else(pa.array(open_), "Unknown", _time(lives.end[rows]))
    low = size <= _GPUS_A_NODE
    return pa.table(
        {
            "Cluster": pa.array(np.full(len(rows), "sim"), pa.string()),
            "JobID": job,
            "JobIDRaw": job,
            "JobName": pc.binary_join_element_wise("train-", pa.array(work).cast(pa.string()), ""),
            "User": pc.binary_join_element_wise("user", pa.array(work % 400).cast(pa.string()), ""),
            "Account": pc.binary_join_element_wise("team", pa.array(work % 40).cast(pa.string()), ""),
            "Partition": pa.array(np.full(len(rows), "train"), pa.string()),
            "QOS": pa.array(np.where(low, "low", "high"), pa.string()),
            "State": _STATES.take(pa.array(states)),
            "ExitCode": pa.array(np.where((states == 2), "1:0", "0:0"), pa.string()),
            "Submit": _time(lives.submit[rows]),
            "Eligible": _time(lives.submit[rows]),
            "Start": _time(lives.start[rows]),
            "End": end,
            "ElapsedRaw": pa.array((lives.end - lives.start)[rows].astype(np.int64)).cast(pa.string()),
            "NNodes": nodes,
            "NCPUS": cpus,
            "AllocTRES": tres,
            "NodeList": _node_lists(lives, rows),
        }
    )


def _work(lives: Lives) -> np.ndarray:
    """The number of the piece of work of each attempt: a retry has that of the run before it on the lane."""
    order = np.lexsort((lives.start, lives.lane))
    number = np.empty(len(order), dtype=np.int64)
    current = lives.run[order].copy()
    retry = lives.retry[order]
    runs = lives.run[order]
    new = np.r_[True, runs[1:] != runs[:-1]] & ~retry
    begins = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    number[order] = current[begins]
    return number


def bad_node(lives: Lives, row: int) -> str:
    """The node at fault of a failed attempt."""
    taken = lives.restarts.get(int(lives.borrow[row]), []) if lives.borrow[row] >= 0 else []
    width = max(int(lives.size[row]) // _GPUS_A_NODE, 1)
    own = max(width - len(taken), 1)
    return f"node{int(lives.lane_nodes[lives.lane[row]]) + int(lives.bad[row]) % own:05d}"


def health_lines(lives: Lives, rng: np.random.Generator) -> Iterator[str]:
    """Results in GCM's form: a critical one within the attribution window of each failure that was seen, and noise."""
    for row in np.flatnonzero(_checked(lives)).tolist():
        check, message = _CHECKS[row % len(_CHECKS)]
        when = EPOCH_S + float(lives.end[row]) + float(rng.uniform(-500, 200))
        yield _line(bad_node(lives, row), check, result=2, when=when, message=message)
    for _ in range(2000):
        node, when = int(rng.integers(lives.nodes)), EPOCH_S + float(rng.uniform(0, lives.end.max()))
        yield _line(f"node{node:05d}", "check_gpu_clock_throttling", result=1, when=when, message="slowed down")


def _line(node: str, check: str, *, result: int, when: float, message: str) -> str:
    return json.dumps(
        {
            "node": node,
            "cluster": "sim",
            "health_check": check,
            "type": "nagios",
            "result": result,
            "_msg": message,
            "end_time": round(when, 3),
        }
    )


def event_lines(lives: Lives, rng: np.random.Generator) -> Iterator[str]:
    """What `sacctmgr -P show event` prints: a node that failed was down or drained until it was repaired."""
    yield "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User"
    checked = _checked(lives)
    for row in np.flatnonzero(lives.fate == 1).tolist():
        start = float(lives.end[row]) + (240 if checked[row] else 0)
        end = start + float(rng.exponential(6 * 3600)) + 600
        state, reason = ("DRAIN", "health check") if checked[row] else ("DOWN*", "Not responding")
        times = _time(np.array([start, end])).to_pylist()
        yield f"sim|{bad_node(lives, row)}|{times[0]}|{times[1]}|{state}|{reason}|root(0)"
