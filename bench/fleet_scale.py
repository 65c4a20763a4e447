"""A generated log of eleven months, 4 million jobs and 150 M GPU-hours with known truth: import and report.

Import and report run as the command line does, each in a process of its own, whose wall time, processor time and peak
memory are taken. The report's rate, ETTR by size and second-order share are held against what was planted. Ray gives
the same report. The ratio is of one analysis done twice in one run, each in a process of its own that starts from the
text and ends with the same figures: by keepstep's modules (`fleet_ours.py`) and by vectorised pandas
(`fleet_pandas.py`); `BOTH_SIDES` says what each does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from fleet_log import write_log
from harness import Result, options, report

QUICK_ATTEMPTS, ALL_ATTEMPTS = 60_000, 4_000_000
LIMIT_S, LIMIT_GIB, AIM = 300.0, 8.0, 5.0
CLOSE = 2e-3
BOTH_SIDES = """both sides: from sacct.txt and health.jsonl (keepstep: events.txt too), in a process of its own
with its imports, to job runs, causes by window, preemptions for a failure, rate with Garwood interval, second-order
share, ledger, ETTR by size
pandas: read_csv of the columns it needs with Arrow's engine, merge_asof, groupby; no row loops
keepstep: every column, time zones, rows that are not well formed, ids, each row once; facts of every attempt, job runs,
failure events, bursts and repeats, cascades, bootstrap of the share; nothing is stored on either side"""
SIDES = {"pandas": "fleet_pandas.py", "keepstep": "fleet_ours.py"}


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--attempts", type=int, default=0, help="attempts to generate [4 million; --quick: 60,000]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--keep", type=Path, help="keep the log and the tables in this directory, and use what is there"
    )
    parser.add_argument("--skip-pandas", action="store_true")
    parser.add_argument("--skip-ray", action="store_true")
    args = parser.parse_args(argv)
    attempts = args.attempts or (QUICK_ATTEMPTS if args.quick else ALL_ATTEMPTS)
    with tempfile.TemporaryDirectory(prefix="keepstep-fleet-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(folder, args, attempts=attempts)
    report("fleet_scale", results, args.format)
    return 0 if all(result.met for result in results) else 1


def measure(folder: Path, args: Any, *, attempts: int) -> list[Result]:
    truth = generated(folder, attempts=attempts, seed=args.seed)
    fleet = folder / "fleet"
    logs = [str(folder / name) for name in ("sacct.txt", "health.jsonl", "events.txt")]
    results = [one("attempts", truth["attempts"], "jobs"), one("GPU-hours", truth["gpu_hours"] / 1e6, "M")]
    imported = ran(["fleet", "import", *logs, "--into", str(fleet)], said="import")
    reported = ran(["fleet", "report", str(fleet), "--format", "json"], said="report", output=folder / "report.json")
    full = attempts >= ALL_ATTEMPTS
    results += [
        one("import", imported["wall"], "s"),
        one("import, processor time", imported["cpu"], "s"),
        one("report", reported["wall"], "s"),
        one("report, processor time", reported["cpu"], "s"),
        limit("import and report", imported["wall"] + reported["wall"], "s", at_most=LIMIT_S if full else None),
        limit("peak memory", max(imported["gib"], reported["gib"]), "GiB", at_most=LIMIT_GIB),
    ]
    found = json.loads((folder / "report.json").read_text())["sections"]
    results += against_truth(found, truth)
    if not args.skip_pandas:
        results += against_pandas(folder)
    if not args.skip_ray:
        results += against_ray(fleet, folder)
    return results


def generated(folder: Path, *, attempts: int, seed: int) -> dict[str, Any]:
    """The truth about the log in `folder`, which is written if it is not there."""
    if not (folder / "truth.json").exists():
        print(f"generating {attempts} attempts", file=sys.stderr)
        write_log(folder, attempts=attempts, rng=np.random.default_rng(seed))
    return json.loads((folder / "truth.json").read_text())


def ran(words: list[str], *, said: str, output: Path | None = None) -> dict[str, float]:
    """Wall and processor seconds and peak GiB of one command of keepstep."""
    return used_by(["-m", "keepstep.cli", *words], said=said, output=output)


def used_by(words: list[str], *, said: str, output: Path | None = None) -> dict[str, float]:
    """Wall and processor seconds and peak GiB of one process of Python."""
    print(said, file=sys.stderr)
    began = time.perf_counter()
    with open(output or os.devnull, "wb") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    found = {
        "wall": time.perf_counter() - began,
        "cpu": used.ru_utime + used.ru_stime,
        "gib": used.ru_maxrss / 1024**2,
    }
    print(", ".join(f"{name} {value:.1f}" for name, value in found.items()), file=sys.stderr)
    return found


def one(name: str, value: float, unit: str) -> Result:
    return Result(name, float(value), unit, None, True, (float(value), float(value)))


def limit(name: str, value: float, unit: str, *, at_most: float | None) -> Result:
    return Result(name, value, unit, at_most, at_most is None or value <= at_most, (value, value))


def within(name: str, value: float, unit: str, *, truth: float, interval: tuple[float, float]) -> Result:
    """A figure with its interval, which is to hold the truth."""
    return Result(name, value, unit, truth, interval[0] <= truth <= interval[1], interval)


def rate_said(found: dict[str, Any]) -> tuple[float, tuple[float, float]]:
    words = next(line for line in found["rates"]["words"] if line.startswith("r_f"))
    value, low, high = re.search(r": ([\d.]+) \[([\d.]+), ([\d.]+)\]", words).groups()
    return float(value), (float(low), float(high))


def against_truth(found: dict[str, Any], truth: dict[str, Any]) -> list[Result]:
    rate, interval = rate_said(found)
    results = [within("failures per 1000 node-days", rate, "", truth=truth["rate_per_1000"], interval=interval)]
    second = found["second_order"]["sheets"]["second_order"]["rows"][0]
    share = truth["second_order_share"]
    results.append(
        within("second-order share", second["share"], "", truth=share, interval=(second["low"], second["high"]))
    )
    planted = {int(size): value for size, value in truth["ettr"].items()}
    rows = {row["group"]: row for row in found["ettr"]["sheets"]["ettr_size"]["rows"]}
    for size, value in sorted(planted.items()):
        row = rows.get(f"{size // 2 + 1}-{size}")
        if row is not None and size > 8:
            results.append(
                within(f"ETTR of {size} GPUs", row["of_sums"], "", truth=value, interval=(row["low"], row["high"]))
            )
    return results


def against_pandas(folder: Path) -> list[Result]:
    """One analysis by both sides, in turn, in this run; the ratio of their processor times."""
    print(BOTH_SIDES, file=sys.stderr)
    results, used, figures = [], {}, {}
    for name, script in SIDES.items():
        output = folder / f"{name}.json"
        used[name] = used_by([str(Path(__file__).parent / script), str(folder)], said=name, output=output)
        figures[name] = json.loads(output.read_text())
        results += [
            one(f"{name}, the same figures from the text", used[name]["wall"], "s"),
            one(f"{name}, processor time", used[name]["cpu"], "s"),
            one(f"{name}, peak memory", used[name]["gib"], "GiB"),
        ]
    ratio = used["pandas"]["cpu"] / used["keepstep"]["cpu"]
    same = agree(figures["pandas"], figures["keepstep"])
    return [
        *results,
        Result("keepstep against pandas, processor time", ratio, "x", AIM, ratio >= AIM, (ratio, ratio)),
        Result("pandas and keepstep agree", float(same), "", 1.0, same, (float(same),) * 2),
    ]


def agree(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether both sides found the same: runs exactly, figures to two in a thousand.

    pandas joins no failures to bursts and does not read events.txt, which explains a few failures more.
    """
    if theirs["runs"] != ours["runs"] or any(theirs[name].keys() != ours[name].keys() for name in ("ettr", "ledger")):
        return False
    pairs = [*zip(theirs["rate"], ours["rate"], strict=True), (theirs["share"], ours["share"])]
    pairs += [(theirs[name][key], ours[name][key]) for name in ("ettr", "ledger") for key in ours[name]]
    return all(abs(left - right) <= CLOSE * abs(right) for left, right in pairs)


def against_ray(fleet: Path, folder: Path) -> list[Result]:
    """The report by Ray tasks says the same."""
    words = ["fleet", "report", str(fleet), "--format", "json", "--engine"]
    ray = ran([*words, "ray"], said="ray", output=folder / "ray.json")
    same = json.loads((folder / "ray.json").read_text()) == json.loads((folder / "report.json").read_text())
    return [
        one("report by Ray tasks", ray["wall"], "s"),
        Result("the same report", float(same), "", 1.0, same, (float(same),) * 2),
    ]


if __name__ == "__main__":
    sys.exit(main())
