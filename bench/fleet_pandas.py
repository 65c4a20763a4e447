"""The other side of the comparison in `fleet_scale.py`: the same analysis in vectorised pandas, written apart.

No row loops. From sacct.txt (read by Arrow's engine of read_csv, faster than the default one) and health.jsonl: job
runs with requeues and retries, causes by the attribution window, who was preempted for whom, failures per node-day
with Garwood interval, the ledger of all GPU time, ETTR by size as a ratio of sums, second-order share.
"""

from __future__ import annotations

import json
import re
import sys
import time
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
KEPT, LOST = pd.Timedelta(minutes=5).total_seconds(), pd.Timedelta(minutes=30).total_seconds()
COLUMNS = {
    "JobID": "job_id",
    "JobName": "name",
    "User": "user",
    "State": "state",
    "Submit": "submit",
    "Eligible": "eligible",
    "Start": "start",
    "End": "end",
    "ElapsedRaw": "elapsed",
    "NNodes": "node_count",
    "AllocTRES": "tres",
    "NodeList": "nodes",
}
TIMES = ["submit", "eligible", "start", "end"]


def read_sacct(path: Path) -> pd.DataFrame:
    """The attempts, with times as datetimes and GPUs as numbers."""
    text = {name: str for name in COLUMNS if name not in ("ElapsedRaw", "NNodes")}
    kinds = text | dict.fromkeys(("State", "User", "AllocTRES"), "category")
    a = pd.read_csv(path, sep="|", engine="pyarrow", usecols=list(COLUMNS), dtype=kinds).rename(columns=COLUMNS)
    for name in TIMES:
        a[name] = pd.to_datetime(a[name], format="%Y-%m-%dT%H:%M:%S", errors="coerce")
    tres = a["tres"].cat.categories.to_series().str.extract(r"gres/gpu=(\d+)")[0].fillna(0).astype(np.int64)
    a["gpus"] = tres.to_numpy()[a["tres"].cat.codes.to_numpy()]
    a["state"] = a["state"].str.split(" ").str[0].astype("category")
    return a


def read_checks(path: Path) -> pd.DataFrame:
    found = pd.read_json(path, lines=True)
    found["time"] = pd.to_datetime(found["end_time"], unit="s").astype("datetime64[us]")
    return found


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


def caused(a: pd.DataFrame, nodes: pd.DataFrame, checks: pd.DataFrame) -> pd.Series:
    """The cause of each failed row by checks within [end - 10 min, end + 5 min], else by its state."""
    checks = checks[checks["result"] == 2]
    checks = checks.assign(cause=checks["health_check"].map(CHECKS))[["node", "time", "cause"]].sort_values("time")
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


def ledger(facts: pd.DataFrame) -> pd.DataFrame:
    """Lives in order of run and start, with kept, waited and held seconds and labels of ends and beginnings."""
    f = facts.sort_values(["run", "start"], kind="stable")
    follows = f["run"].eq(f["run"].shift()).to_numpy()
    keeps = f["state"].isin(["COMPLETED", "RUNNING"]).to_numpy()
    tail = np.where(keeps, 0, np.minimum(f["held"], LOST))
    begin = np.minimum(f["held"] - tail, KEPT)
    ends = [f["robbed"], f["state"].eq("PREEMPTED"), f["infrastructure"], f["failed"]]
    end = np.select(ends, ["second_order", "preemption", "recomputation", "user_failure"], "unknown")
    name = {"recomputation": "restart", "unknown": "start_up"}
    before = pd.Series(end).shift().map(lambda label: name.get(label, label)).to_numpy()
    asked = f["eligible"].where(~(follows & f["job_id"].eq(f["job_id"].shift()).to_numpy()), f["end"].shift())
    return f.assign(
        tail=tail,
        begin=begin,
        kept=f["held"] - tail - begin,
        end_label=end,
        begin_label=np.where(follows, before, "start_up"),
        waited=(f["start"] - asked).dt.total_seconds().clip(lower=0).fillna(0),
    )


def by_label(lives: pd.DataFrame) -> dict[str, float]:
    """GPU-hours under each label."""
    hours = lives["gpus"] / 3600
    sums = (lives["tail"] * hours).groupby(lives["end_label"]).sum()
    sums = sums.add((lives["begin"] * hours).groupby(lives["begin_label"]).sum(), fill_value=0)
    sums["kept_step"] = (lives["kept"] * hours).sum()
    return {label: float(value) for label, value in sums.items() if value}


def ettr(lives: pd.DataFrame) -> dict[str, float]:
    """Kept over waited and held GPU time, by the runs' size."""
    size = lives.groupby("run")["gpus"].transform("max")
    top = np.maximum(8, 2 ** np.ceil(np.log2(size))).astype(np.int64)
    group = pd.DataFrame({"good": lives["kept"] * lives["gpus"], "top": top})
    group["wall"] = (lives["waited"] + lives["held"]) * lives["gpus"]
    sums = group.groupby("top").sum()
    names = [f"{1 if top == 8 else top // 2 + 1}-{top}" for top in sums.index]
    return dict(zip(names, (sums["good"] / sums["wall"]).tolist(), strict=True))


def analyse(folder: Path) -> dict[str, object]:
    a = read_sacct(folder / "sacct.txt")
    a["held"] = (a["end"] - a["start"]).dt.total_seconds().fillna(a["elapsed"])
    nodes = expanded(a)
    before, _, _ = linked(a)
    cause = caused(a, nodes, read_checks(folder / "health.jsonl"))
    failed, infrastructure, robbed = (np.zeros(len(a), dtype=bool) for _ in range(3))
    failed[cause.index] = True
    infrastructure[cause.index[cause.ne("program_error")]] = True
    robbed[victims(a, nodes, before=before, failed=failed)] = True
    run = roots(before)
    lives = ledger(a.assign(run=run, failed=failed, infrastructure=infrastructure, robbed=robbed))
    large = a["gpus"].to_numpy() > 128
    events, days = int((large & infrastructure).sum()), float((a["held"] * a["node_count"])[large].sum() / 86400)
    lost = np.minimum(a["held"], LOST).to_numpy() * a["gpus"].to_numpy()
    first, second = lost[infrastructure].sum(), lost[robbed].sum()
    tails = chi2.ppf(0.025, 2 * events) / 2, chi2.ppf(0.975, 2 * events + 2) / 2
    return {
        "runs": len(np.unique(run)),
        "rate": [value / days * 1000 for value in (events, *tails)],
        "share": float(second / (first + second)),
        "ettr": ettr(lives),
        "ledger": by_label(lives),
    }


if __name__ == "__main__":
    began = time.process_time()
    figures = analyse(Path(sys.argv[1]))
    print(json.dumps(figures | {"analysis_s": time.process_time() - began}))
