"""Sections of the report about time: the ledger, and ETTR measured and expected."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.account import ledger_totals
from keepstep.fleet.attempt_arrays import exact_sum
from keepstep.fleet.ettr import DEFINITIONS, Training, exact, failure_free_minutes, finite, published
from keepstep.fleet.ettr_measured import ettr_cells
from keepstep.fleet.ledger import LABELS, LOSSES, ledger_lines
from keepstep.fleet.rates_by_size import reference_rate
from keepstep.fleet.sizes import DURATIONS, SIZES, duration_class
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, sheet

__all__ = ["ettr_section", "ledger_section"]

_ETTR_SHOWN = (
    ("", "{group}"),
    ("runs", "{runs:,}"),
    ("GPU-hours", "{gpu_hours}"),
    ("ratio of sums [95 %]", "{of_sums:.4f} [{low:.4f}, {high:.4f}]"),
    ("mean of ratios", "{mean_of_ratios:.4f}"),
    ("waiting", "{wait_share:.1%}"),
)
_MOST_GROUPS = 40
_MEASURED = "measured: kept-step time / (waiting + allocated time), weighted by GPUs"
_TOLD_BY = {"data_loading": "data_start", "compilation": "compile_start", "validation": "validation_start"}
"""Labels that only samples of a training run give, and the word of `progress` that begins them."""
_LONG_RUN_US = 24 * 3_600_000_000


def ledger_section(data: FleetData) -> Section:
    """Every GPU-second under one label, the check that it adds up, and what was assumed."""
    totals = ledger_totals(data.account)
    seen = data.account.attempts
    allocated = exact_sum(seen.length * seen.gpus)
    journaled = exact_sum((seen.length * seen.gpus)[data.account.journaled])
    lost = sum(totals[label] for label in LOSSES)
    words = (
        f"{allocated / 3.6e9:,.3f} GPU-hours allocated; labels add up to {sum(totals.values()) / 3.6e9:,.3f}; "
        f"difference {sum(totals.values()) - allocated} us, largest of one attempt {data.account.off} us",
        f"losses {lost / 3.6e9:,.3f} GPU-hours ({_share(lost, allocated)} of what was allocated)",
        f"from journals or training logs: {_share(journaled, allocated)} of the GPU-hours; the rest is assumed: "
        f"{data.options.assumptions.said()}",
        "no source measures telemetry and link_collision yet: they are 0 for want of data, not of loss",
        *_untold(data),
    )
    by_size = [
        {"size": SIZES[size]}
        | {label: value / 3.6e9 for label, value in ledger_totals(data.account, size=size).items()}
        for size, row in enumerate(data.account.by_size)
        if any(row)
    ]
    shown = (("label", "{label}"), ("GPU-hours", "{gpu_hours}"), ("share", "{share:.3%}"), ("loss", "{loss}"))
    lines = [
        msgspec.structs.asdict(line) | {"loss": "loss" if line.label in LOSSES else ""} for line in ledger_lines(totals)
    ]
    return Section(
        "ledger",
        "Where the time went",
        words,
        (
            sheet("ledger", "Ledger", rows=lines, shown=shown),
            sheet("ledger_by_size", "Ledger by size (GPU-hours)", rows=by_size, drawn=True, note=", ".join(LABELS)),
        ),
    )


def _untold(data: FleetData) -> tuple[str, ...]:
    """Which uses of the time no source of this fleet tells apart."""
    told = set(data.rows("SELECT DISTINCT what FROM progress")["what"].to_pylist())
    missing = {label: word for label, word in _TOLD_BY.items() if word not in told}
    if not missing:
        return ()
    return (
        f"no source here tells {', '.join(missing)} apart: that time is in kept_step, start_up and unknown; a training "
        f"log would ({', '.join(missing.values())})",
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def ettr_section(data: FleetData) -> Section:
    """Measured ETTR by size, length, kind and group; expected ETTR by size in its three forms."""
    times, rng = data.times, data.rng(1)
    firsts = times.first
    seen = data.account.attempts
    groupings: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
        ("all", "All runs", np.zeros(len(times.run), np.int64), ("all",)),
        ("size", "By size (GPUs)", data.sizes, SIZES),
        ("duration", "By allocated time", duration_class(times.allocated), DURATIONS),
        ("kind", "By kind (partition)", seen.kind[0][firsts], seen.kind[1]),
        ("group", f"By group ({data.options.group})", seen.group[0][firsts], seen.group[1]),
    )
    sheets = []
    for key, title, group, names in groupings:
        found = ettr_cells(times, group, names=names, rng=rng)
        found = tuple(sorted(found, key=lambda cell: -cell.gpu_hours)) if key in ("kind", "group") else found
        note = _MEASURED
        if len(found) > _MOST_GROUPS:
            note += f"; the {_MOST_GROUPS} with the most GPU-hours of {len(found)}"
        sheets.append(sheet(f"ettr_{key}", title, rows=found[:_MOST_GROUPS], shown=_ETTR_SHOWN, note=note))
    long = np.flatnonzero(times.allocated >= _LONG_RUN_US)
    day = _chosen(times, long)
    sheets.append(
        sheet(
            "ettr_long",
            "By size, runs of at least 24 hours allocated",
            rows=ettr_cells(day, data.sizes[long], names=SIZES, rng=rng),
            shown=_ETTR_SHOWN,
            note=f"{_MEASURED}; the runs of the published figures (Meta, HPCA 2025)",
        )
    )
    sheets.append(_expected(data))
    words = tuple(f"{form}: {meaning}" for form, meaning in DEFINITIONS.items())
    return Section("ettr", "Effective training time ratio", words, tuple(sheets))


def _chosen(times: Any, which: Any) -> Any:
    return type(times)(*(getattr(times, field)[which] for field in times.__struct_fields__))


def _expected(data: FleetData) -> Any:
    """Expected ETTR by size, from the rate of large jobs and the assumptions, beside what was measured."""
    rate, which = reference_rate(data.lives)
    options = data.options
    measured = {cell.group: cell for cell in ettr_cells(data.times, data.sizes, names=SIZES, rng=data.rng(2))}
    rows = []
    for size in np.unique(data.sizes):
        here, name = data.sizes == size, SIZES[int(size)]
        nodes = _mean_nodes(data, here)
        mean = failure_free_minutes(nodes, rate.value / 1000.0, gpus_per_node=1) if rate.events else math.nan
        lives = int(data.times.lives[here].sum())
        queue = float(data.times.waited[here].sum()) / 6e7 / lives if lives else 0.0
        training = Training(
            mean, options.interval_minutes, startup=options.startup_minutes, write=options.write_minutes, queue=queue
        )
        productive = float(data.times.productive[here].mean()) / 6e7 if here.any() else float("nan")
        rows.append(
            {
                "size": name,
                "mean_minutes_between_failures": mean,
                "mean_wait_minutes": queue,
                "published": published(training),
                "exact": exact(training),
                "finite": finite(training, productive) if productive > 0 else float("nan"),
                "measured": measured[name].of_sums if name in measured else float("nan"),
            }
        )
    shown = (
        ("size", "{size}"),
        ("M (min)", "{mean_minutes_between_failures}"),
        ("wait (min)", "{mean_wait_minutes}"),
        ("published form", "{published:.4f}"),
        ("exact form", "{exact:.4f}"),
        ("finite run", "{finite:.4f}"),
        ("measured", "{measured:.4f}"),
    )
    modelled = f"{rate.value:.3g} per 1000 node-days" if rate.events else "unknown: no event"
    note = (
        f"modelled from the rate of {which}: {modelled}; checkpoints every "
        f"{options.interval_minutes:g} min with a pause of {options.write_minutes:g} min, start-up "
        f"{options.startup_minutes:g} min, mean wait per life; the published form has no queue; finite: the mean "
        f"productive time of the size"
    )
    return sheet("ettr_expected", "Expected by size", rows=rows, shown=shown, note=note)


def _mean_nodes(data: FleetData, here: Any) -> float:
    weight = data.times.allocated[here].astype(float)
    return float((data.times.nodes[here] * weight).sum() / weight.sum()) if weight.sum() else float("nan")
