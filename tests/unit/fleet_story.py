"""A fleet with a planted truth, written as the files an operator would have: sacct, modes, health, node events.

Jobs of 1 to `largest` nodes come at random; nodes fail at `per_1000` per node-day; a failed job starts again after two
minutes and, when it is large, has a small job preempted for it. In the second half the policy is called automatic and
changes nothing, so that a comparison has nothing to find. Times are seconds from `ORIGIN`; chance comes from one seed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

ORIGIN = 1_735_689_600
DAY = 86_400
COLUMNS = (
    "JobIDRaw|JobID|JobName|User|Account|Partition|State|ExitCode|Submit|Eligible|Start|End|NNodes|AllocTRES|NodeList"
)


def when(second: float) -> str:
    return datetime.fromtimestamp(ORIGIN + int(second), UTC).strftime("%Y-%m-%dT%H:%M:%S")


def write_story(into: Path, *, jobs: int = 400, days: int = 90, largest: int = 128, per_1000: float = 20.0) -> Path:
    """All files, in `into`."""
    rng = np.random.default_rng(20)
    into.mkdir(parents=True, exist_ok=True)
    lines = [COLUMNS]
    for number in range(1, jobs + 1):
        lines += job(rng, number * 100, days=days, largest=largest, per_1000=per_1000)
    (into / "sacct.txt").write_text("\n".join(lines) + "\n")
    half = when(days * DAY / 2)
    modes = ["mode,start,end", f"off,{when(0)}Z,{half}Z", f"automatic,{half}Z,"]
    (into / "policy_modes.csv").write_text("\n".join(modes) + "\n")
    (into / "node_intervals.csv").write_text("\n".join(["node,kind,start,end,reason", *node_faults(rng, days)]) + "\n")
    (into / "health_results.csv").write_text("\n".join(["node,check,time,status", *checks(rng, days)]) + "\n")
    return into


def job(rng: np.random.Generator, number: int, *, days: int, largest: int, per_1000: float) -> list[str]:
    """All lives of one job, and the small job that has to go for its restart."""
    nodes = 2 ** int(rng.integers(0, int(np.log2(largest)) + 1))
    first = int(rng.integers(0, max(1, 512 - nodes)))
    work = rng.exponential(12 * 3600) + 600
    submit = rng.uniform(0, days * DAY - work)
    start, lines = submit + rng.exponential(120 * nodes), []
    while True:
        life = rng.exponential(1000 / per_1000 / nodes) * DAY
        end = start + min(life, work)
        state = "COMPLETED" if work <= life else "NODE_FAIL"
        if state == "COMPLETED" and rng.random() < 0.1:
            state = "FAILED"
        lines.append(line(number, state, nodes=nodes, first=first, times=(submit, start, end)))
        if state != "NODE_FAIL" or len(lines) > 8:
            return lines
        if nodes >= 16:
            victim = number + len(lines)
            lines.append(line(victim, "PREEMPTED", nodes=1, first=first, times=(start, start + 10, end + 118)))
        work -= min(life, work) * 0.9
        submit, start = end + 1, end + 120


def letters(number: int) -> str:
    """A name of its own without digits, which a reader could take for the count of a retry."""
    return "job-" + "".join(chr(97 + int(digit)) for digit in str(number))


def line(number: int, state: str, *, nodes: int, first: int, times: tuple[float, float, float]) -> str:
    code = {"FAILED": "1:0", "NODE_FAIL": "1:0"}.get(state, "0:0")
    names = f"n{first}" if nodes == 1 else f"n[{first}-{first + nodes - 1}]"
    kind = "large" if nodes >= 16 else "small"
    submit, start, end = map(when, times)
    tres = f"billing=1,cpu={nodes},gres/gpu={8 * nodes},node={nodes}"
    fields = (
        number,
        number,
        letters(number),
        f"user{number % 7}",
        f"team{number // 100 % 3}",
        kind,
        state,
        code,
        submit,
        submit,
        start,
        end,
    )
    return "|".join(map(str, (*fields, nodes, tres, names)))


def node_faults(rng: np.random.Generator, days: int) -> list[str]:
    """Faults of 40 nodes; every tenth node fails often."""
    rows = []
    for node in range(40):
        for at in np.sort(rng.uniform(0, days * DAY - DAY, rng.poisson(6 if node % 10 == 0 else 0.5))):
            rows.append(f"n{node},fault,{when(at)}Z,{when(at + rng.exponential(6 * 3600))}Z,gpu ecc")
    return rows


def checks(rng: np.random.Generator, days: int) -> list[str]:
    """A check introduced at half time on the first 20 nodes, failing now and then."""
    rows = []
    for node in range(20):
        for at in np.arange(days * DAY / 2, days * DAY, DAY):
            rows.append(f"n{node},gpu_ecc,{when(at)}Z,{2 if rng.random() < 0.03 else 0}")
    return rows
