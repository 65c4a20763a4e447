"""The comparison for `fleet_scale.py`: the same figures in vectorised pandas, written apart from keepstep's code.

No row loops. Read from the same Parquet files: job runs with requeues and retries, causes by the attribution window,
who was preempted for whom, failures per node-day with Garwood intervals, ETTR as a ratio of sums, second-order share.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import chi2

FAILED = ["NODE_FAIL", "FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED"]
RETRIED = [*FAILED, "TIMEOUT", "PREEMPTED", "DEADLINE"]
HOUR = pd.Timedelta(hours=1)
CHECKS = {
    "check_gpu_ecc": "gpu_memory",
    "check_ib_link": "network_link",
    "check_gpu_count": "gpu_lost",
    "check_nvlink_status": "gpu_link",
    "check_fs_mount": "storage",
}
COLUMNS = [
    "attempt_id",
    "job_id",
    "user",
    "name",
    "state",
    "submit",
    "start",
    "end",
    "last_seen",
    "gpus",
    "node_count",
    "nodes",
]


def read(folder: Path, table: str, columns: list[str]) -> pd.DataFrame:
    files = sorted((folder / "tables" / table).rglob("*.parquet"))
    return pd.concat([pd.read_parquet(file, columns=columns, partitioning=None) for file in files], ignore_index=True)


def expanded(attempts: pd.DataFrame) -> pd.DataFrame:
    """One row for each attempt and node. Lists are written out once for each different list."""
    codes, lists = pd.factorize(attempts["nodes"])
    names = [names_of(text) for text in lists]
    counts = np.array([len(one) for one in names])
    flat = np.array([name for one in names for name in one], dtype=object)
    first = np.r_[0, np.cumsum(counts)][:-1]
    each = counts[codes]
    index = np.repeat(first[codes], each) + np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return pd.DataFrame({"row": np.repeat(np.arange(len(attempts)), each), "node": pd.Categorical(flat[index])})


def names_of(text: str) -> list[str]:
    out = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        head, bracket, inside = part.partition("[")
        if not bracket:
            out.append(part)
            continue
        for piece in inside.rstrip("]").split(","):
            low, _, high = piece.partition("-")
            out += [f"{head}{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return out


def linked(a: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predecessor of each row (-1: none), whether by requeue, whether by retry."""
    a = a.sort_values(["job_id", "submit", "start"], kind="stable")
    same = a["job_id"].eq(a["job_id"].shift()) & (a["submit"] <= a["end"].shift() + HOUR)
    before = np.full(len(a), -1)
    rows = a.index.to_numpy()
    before[rows[same.to_numpy()]] = rows[np.flatnonzero(same.to_numpy()) - 1]
    requeued = before >= 0
    gone = np.zeros(len(a), dtype=bool)
    gone[before[requeued]] = True
    a = a.sort_index()
    ended = a[a["state"].isin(RETRIED) & a["end"].notna() & ~gone][["user", "name", "end"]].sort_values("end")
    fresh = a[~requeued][["user", "name", "submit"]].sort_values("submit")
    ended, fresh = ended.assign(old=ended.index), fresh.assign(new=fresh.index)
    pairs = pd.merge_asof(ended, fresh, left_on="end", right_on="submit", by=["user", "name"], direction="forward")
    pairs = pairs[pairs["submit"].notna() & (pairs["submit"] <= pairs["end"] + HOUR) & (pairs["old"] != pairs["new"])]
    pairs = pairs.sort_values(["end"]).drop_duplicates("new", keep="last")
    retried = np.zeros(len(a), dtype=bool)
    new = pairs["new"].astype(np.int64).to_numpy()
    before[new], retried[new] = pairs["old"].to_numpy(), True
    return before, requeued, retried


def roots(before: np.ndarray) -> np.ndarray:
    parent = np.where(before >= 0, before, np.arange(len(before)))
    while not np.array_equal(parent[parent], parent):
        parent = parent[parent]
    return parent


def caused(a: pd.DataFrame, nodes: pd.DataFrame, folder: Path) -> pd.Series:
    """The cause of each failed row by checks within [end - 10 min, end + 5 min], else by its state."""
    checks = read(folder, "health_results", ["node", "check", "time", "status"])
    checks = checks[checks["status"] == 2].assign(cause=checks["check"].map(CHECKS)).sort_values("time")
    failed = a[a["state"].isin(FAILED)]
    pairs = nodes[nodes["row"].isin(failed.index)].merge(checks, on="node")
    end = failed["end"].reindex(pairs["row"]).to_numpy()
    lag = pairs["time"].to_numpy() - end
    hit = pairs[(lag >= np.timedelta64(-10, "m")) & (lag <= np.timedelta64(5, "m"))].drop_duplicates("row")
    cause = pd.Series(np.where(failed["state"] == "NODE_FAIL", "node_lost", "program_error"), index=failed.index)
    cause.loc[hit["row"]] = hit["cause"].to_numpy()
    return cause


def victims(a: pd.DataFrame, nodes: pd.DataFrame, *, before: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Rows that were preempted for the restart of a failed one."""
    gone = nodes[nodes["row"].isin(a.index[a["state"] == "PREEMPTED"])]
    gone = gone.assign(at=a["end"].reindex(gone["row"]).to_numpy() - np.timedelta64(2, "s")).sort_values("at")
    starts = nodes[nodes["node"].isin(gone["node"])]
    starts = starts.assign(at=a["start"].reindex(starts["row"]).to_numpy()).dropna(subset=["at"]).sort_values("at")
    found = pd.merge_asof(
        gone,
        starts.rename(columns={"row": "taker"}),
        on="at",
        by="node",
        direction="forward",
        tolerance=pd.Timedelta(minutes=10),
    ).dropna(subset=["taker"])
    taker = found["taker"].astype(np.int64).to_numpy()
    behind = before[taker]
    return found["row"].to_numpy()[(behind >= 0) & failed[np.maximum(behind, 0)]]


def analyse(folder: Path) -> dict[str, float]:
    a = read(folder, "attempts", COLUMNS)
    held = (a["end"].fillna(a["last_seen"]) - a["start"]).dt.total_seconds().to_numpy()
    nodes = expanded(a)
    before, requeued, retried = linked(a)
    run = roots(before)
    cause = caused(a, nodes, folder)
    infrastructure = cause.ne("program_error")
    failed = np.zeros(len(a), dtype=bool)
    failed[cause.index] = True
    gpus, size = a["gpus"].to_numpy(), a["node_count"].to_numpy()
    large = gpus > 128
    events = int(large[cause.index[infrastructure]].sum())
    days = float((held * size)[large].sum() / 86400)
    robbed = np.unique(victims(a, nodes, before=before, failed=failed))
    lost = np.minimum(held, 1800) * gpus
    first, second = lost[cause.index[infrastructure]].sum(), lost[robbed].sum()
    span = (
        pd.DataFrame({"run": run, "held": held * gpus, "gpus": gpus, "begin": a["submit"], "end": a["end"]})
        .groupby("run")
        .agg(held=("held", "sum"), gpus=("gpus", "max"), begin=("begin", "min"), end=("end", "max"))
    )
    wide = span[(span["gpus"] >= 256) & span["end"].notna()]
    wall = ((wide["end"] - wide["begin"]).dt.total_seconds() * wide["gpus"]).sum()
    return {
        "runs": float(len(np.unique(run))),
        "requeues": float(requeued.sum()),
        "retries": float(retried.sum()),
        "infrastructure": float(infrastructure.sum()),
        "rate_per_1000": events / days * 1000,
        "rate_low": chi2.ppf(0.05, 2 * events) / 2 / days * 1000,
        "rate_high": chi2.ppf(0.95, 2 * events + 2) / 2 / days * 1000,
        "running_share": float(wide["held"].sum() / wall),
        "second_order_share": float(second / (first + second)),
        "preempted_for_a_failure": float(len(robbed)),
    }
