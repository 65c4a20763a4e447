"""Section of the report that compares periods: off, observe, automatic, on matched jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from keepstep.fleet.comparison import Compared, PeriodRuns, compare_periods
from keepstep.fleet.rates import rate_of
from keepstep.fleet.sizes import SIZES
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, Sheet, sheet

__all__ = ["periods_section"]

_MODES = ("off", "observe", "after_job", "at_checkpoint", "automatic")
_PERIODS = """
SELECT mode, cluster, epoch_us(start) AS low, epoch_us("end") AS high FROM policy_modes
WHERE scope = '' OR scope IS NULL ORDER BY start, mode
"""
_KEPT = "kept GPU-hours per allocated GPU-hour"
_SHOWN = (
    ("quantity", "{quantity}"),
    ("periods", "{before_mode} -> {after_mode}"),
    ("before", "{before}"),
    ("after", "{after}"),
    ("difference [95 %]", "{difference} [{low}, {high}]"),
    ("recovered", "{recovered}"),
    ("matched jobs", "{runs_before:,}, {runs_after:,}"),
    ("verdict", "{verdict}"),
)
_PROGRESS = """
WITH samples AS (
    SELECT f.run_id, f.attempt_id, min(p.step) AS low, max(p.step) AS high,
           min(p.tokens) AS few, max(p.tokens) AS many
    FROM progress p JOIN attempts a ON a.job_id = coalesce(nullif(p.scheduler_job, ''), p.job)
     AND (p.cluster = '' OR p.cluster = a.cluster) AND p.time >= a.start AND p.time <= coalesce(a."end", a.last_seen)
    JOIN attempt_facts f ON f.attempt_id = a.attempt_id WHERE p.what = 'step' GROUP BY ALL
)
SELECT run_id, max(high) - min(low) AS steps, max(many) - min(few) AS tokens
FROM samples GROUP BY run_id ORDER BY run_id
"""
_WAIT = """
SELECT m.mode, count(*) AS incidents, sum(i.detected_us) / 3.6e9 AS hours
FROM incidents i JOIN policy_modes m ON (m.cluster = '' OR m.cluster = i.cluster) AND i.onset >= m.start
 AND i.onset < coalesce(m."end", TIMESTAMP '9999-01-01') AND (m.scope = '' OR m.scope IS NULL)
WHERE NOT coalesce(i.drill, false) AND i.detected_us IS NOT NULL GROUP BY m.mode
"""


def periods_section(data: FleetData) -> Section:
    """Pairs of modes that occur, each on what both periods have in common."""
    title = "Off, observe, automatic"
    periods = data.rows(_PERIODS).to_pylist() if data.store.rows("policy_modes") else []
    mode = _mode_of_runs(data, periods)
    present = [name for number, name in enumerate(_MODES) if (mode == number).any()]
    if len(present) < 2:
        said = "fewer than two policy modes are on record with jobs in them: nothing to compare"
        return Section("periods", title, (said,))
    pairs = [(one, two) for at, one in enumerate(present) for two in present[at + 1 :]]
    quantities = _quantities(data)
    rows = [_compared(data, quantity, mode=mode, pair=pair) for pair in pairs for quantity in quantities]
    words = (
        "matched on size and partition; each class weighs what both periods have in common; 95 % bootstrap over jobs; "
        "only jobs that ran wholly inside a period; recovered: the difference times the matched part of the later one",
        *_waits(data),
    )
    return Section(
        "periods",
        title,
        words,
        (
            sheet("periods", "Compared", rows=rows, shown=_SHOWN),
            _by_size(data, mode=mode, pairs=pairs),
            _faults(data, mode=mode, present=present),
        ),
    )


def _mode_of_runs(data: FleetData, periods: list[dict[str, Any]]) -> Any:
    """The mode each run lay wholly inside, -1 where it lay in none or the mode changed."""
    times = data.times
    mode = np.full(len(times.run), -1)
    for row in periods:
        if row["mode"] in _MODES and row["low"] is not None:
            high = row["high"] if row["high"] is not None else np.iinfo(np.int64).max
            mode[(times.start >= row["low"]) & (times.end <= high)] = _MODES.index(row["mode"])
    return mode


def _quantities(data: FleetData) -> list[tuple[str, PeriodRuns, bool]]:
    """(name, per run what it yields over what, whether more is better)."""
    times, seen = data.times, data.account.attempts
    first = times.first
    stratum = data.sizes * 1_000_000 + seen.kind[0][first]
    failures = np.add.reduceat((seen.infrastructure & seen.independent).astype(float), first)
    lost = np.add.reduceat(data.account.losses, first) / 6e7
    ones = np.ones(len(first))
    found = [
        (
            "kept GPU-hours per allocated GPU-hour",
            PeriodRuns(stratum, times.gpu_productive, times.gpu_allocated),
            True,
        ),
        ("share of jobs affected", PeriodRuns(stratum, (failures > 0) * 1.0, ones), False),
        ("minutes lost per incident", PeriodRuns(stratum, lost, failures), False),
    ]
    return found + _progressed(data, stratum=stratum, gpu_hours=times.gpu_allocated)


def _progressed(data: FleetData, *, stratum: Any, gpu_hours: Any) -> list[tuple[str, PeriodRuns, bool]]:
    """Kept tokens, and kept steps (within one job and size), where training logs or journals say them."""
    if not data.store.rows("progress"):
        return []
    rows = data.rows(_PROGRESS)
    times, seen = data.times, data.account.attempts
    place = np.searchsorted(times.run, rows["run_id"].to_numpy())
    place = np.minimum(place, len(times.run) - 1)
    here = times.run[place] == rows["run_id"].to_numpy()
    found = []
    steps = data.sizes * 1_000_000 + seen.group[0][times.first]
    for name, column, groups in (("tokens", "tokens", stratum), ("steps of one group", "steps", steps)):
        values = rows[column].cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
        good = here & np.isfinite(values)
        at = place[good]
        if good.any():
            runs = PeriodRuns(groups[at], values[good], gpu_hours[at])
            found.append((f"kept {name} per allocated GPU-hour", _spread(runs, at, count=len(times.run)), True))
    return found


def _spread(runs: PeriodRuns, place: Any, *, count: int) -> PeriodRuns:
    """The same with one entry for every run; those without samples have nothing in `below` and do not count."""
    columns = [np.zeros(count, values.dtype) for values in (runs.stratum, runs.above, runs.below)]
    for column, values in zip(columns, (runs.stratum, runs.above, runs.below), strict=True):
        column[place] = values
    return PeriodRuns(*columns)


def _compared(data: FleetData, quantity: tuple[str, PeriodRuns, bool], *, mode: Any, pair: tuple[str, str]) -> Compared:
    name, runs, better = quantity
    sides = [_where(runs, mode == _MODES.index(one)) for one in pair]
    return compare_periods(name, pair, before=sides[0], after=sides[1], rng=data.rng(7), higher_is_better=better)


def _where(runs: PeriodRuns, which: Any) -> PeriodRuns:
    return PeriodRuns(runs.stratum[which], runs.above[which], runs.below[which])


def _by_size(data: FleetData, *, mode: Any, pairs: list[tuple[str, str]]) -> Sheet:
    """Kept time per allocated GPU-hour, each size by itself."""
    name, runs, better = _quantities(data)[0]
    rows = []
    for number in np.unique(data.sizes[mode >= 0]):
        here = np.where(data.sizes == number, mode, -1)
        rows += [_compared(data, (f"{SIZES[int(number)]} GPUs", runs, better), mode=here, pair=pair) for pair in pairs]
    return sheet("periods_by_size", f"By size: {name}", rows=rows, shown=_SHOWN)


def _faults(data: FleetData, *, mode: Any, present: list[str]) -> Sheet:
    """Independent failures by cause and mode, per 1000 node-days."""
    seen = data.account.attempts
    of_attempt = np.repeat(mode, data.times.lives)
    event = seen.infrastructure & seen.independent
    node_days = data.lives.node_days
    rows = []
    for name in present:
        here = of_attempt == _MODES.index(name)
        exposure = float(node_days[here].sum()) / 1000.0
        for cause in np.unique(seen.cause[0][event]):
            rate = rate_of(int((here & event & (seen.cause[0] == cause)).sum()), exposure)
            row = {"cause": seen.cause[1][int(cause)] or "unknown", "mode": name, "events": rate.events}
            rows.append(row | {"rate": rate.value, "low": rate.low, "high": rate.high})
    shown = (
        ("cause", "{cause}"),
        ("mode", "{mode}"),
        ("events", "{events:,}"),
        ("per 1000 node-days [95 %]", "{rate} [{low}, {high}]"),
    )
    return sheet("periods_faults", "Faults by kind", rows=sorted(rows, key=lambda row: row["cause"]), shown=shown)


def _waits(data: FleetData) -> tuple[str, ...]:
    """Time collectives waited before an incident was detected, by mode."""
    if not data.store.rows("incidents"):
        return ("collective wait: no incident is on record",)
    rows = data.rows(_WAIT).to_pylist()
    said = "; ".join(f"{row['mode']} {row['hours']:.3f} h in {row['incidents']} incidents" for row in rows)
    return (f"collective wait before detection: {said or 'no incident inside a period'}",)
