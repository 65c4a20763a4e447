"""The charts of the fleet report, drawn from its sheets by matplotlib as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keepstep.fleet.ledger import LOSSES
from keepstep.service.fleet_sheet import FleetReport, Sheet

__all__ = ["Chart", "charts_of"]

_INK, _SOFT, _GRID = "#1d2733", "#5b6875", "#dfe4ea"
_KEPT, _USED, _LOST, _MODEL, _MARK = "#2a9d8f", "#8ab6c9", "#d1495b", "#b5762a", "#1f6f8b"
_STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "keepstep",
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _SOFT,
    "axes.titlecolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "grid.color": _GRID,
    "legend.frameon": False,
}
_MOST_CURVES = 10
_Sheets = list[Sheet | None]


class Chart(msgspec.Struct, frozen=True):
    """A picture for the section `section`: an `<svg>` element and the words under it."""

    section: str
    svg: str
    caption: str


def charts_of(report: FleetReport) -> dict[str, list[Chart]]:
    """All charts whose sheets have rows, by section. The same report gives the same bytes."""
    found: dict[str, list[Chart]] = {}
    for section, keys, draw, caption in _CHARTS:
        sheets = [report.sheet(key) for key in keys]
        if sheets[0] is not None and sheets[0].rows:
            with mpl.rc_context(_STYLE):
                figure = Figure(figsize=(8.6, 3.9), layout="constrained")
                draw(figure.add_subplot(), sheets)
                found.setdefault(section, []).append(Chart(section, _svg(figure), caption))
    return found


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r"<svg \1\2", text)


def _first(sheets: _Sheets) -> Sheet:
    """The sheet a chart is of; it is only drawn if that has rows."""
    assert sheets[0] is not None
    return sheets[0]


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _legend(axes: Axes) -> None:
    """To the right of the picture."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)


def _column(sheet: Sheet, name: str) -> list[float]:
    return [_finite(row.get(name)) for row in sheet.rows]


def _ledger(axes: Axes, sheets: _Sheets) -> None:
    """A waterfall: from everything allocated down to the kept steps, each label taking its share away."""
    sheet = _first(sheets)
    rows = [row for row in sheet.rows if row["label"] != "kept_step"]
    rows.sort(key=lambda row: (row["label"] in LOSSES, -row["gpu_hours"]))
    total = sum(row["share"] for row in sheet.rows)
    names, level = ["allocated"], total
    axes.bar(0, 100 * total, color=_INK, width=0.7)
    for at, row in enumerate(rows, 1):
        colour = _LOST if row["label"] in LOSSES else _USED
        axes.bar(at, 100 * row["share"], bottom=100 * (level - row["share"]), color=colour, width=0.7)
        axes.text(at, 100 * level + 0.6, f"{row['share']:.1%}", ha="center", va="bottom", fontsize=8, color=_SOFT)
        level -= row["share"]
        names.append(row["label"].replace("_", " "))
    axes.bar(len(rows) + 1, 100 * level, color=_KEPT, width=0.7)
    axes.text(len(rows) + 1, 100 * level + 0.6, f"{level:.1%}", ha="center", va="bottom", fontsize=8, color=_INK)
    axes.set_xticks(range(len(rows) + 2), [*names, "kept step"], rotation=35, ha="right")
    axes.set_ylim(max(0.0, 100 * level - 12), 106)
    axes.set_ylabel("share of allocated GPU-hours [%]")
    axes.set_title("Where the time went")
    axes.yaxis.grid(visible=True)
    axes.set_axisbelow(True)


def _ettr(axes: Axes, sheets: _Sheets) -> None:
    sheet, expected = _first(sheets), sheets[1]
    places = list(range(len(sheet.rows)))
    names = [row["group"] for row in sheet.rows]
    value = _column(sheet, "of_sums")
    low, high = _column(sheet, "low"), _column(sheet, "high")
    errors = [[v - a if math.isfinite(a) else 0.0 for v, a in zip(value, low, strict=True)]]
    errors.append([b - v if math.isfinite(b) else 0.0 for v, b in zip(value, high, strict=True)])
    axes.bar(places, value, color=_KEPT, width=0.62, label="measured (ratio of sums, 95 %)")
    axes.errorbar(
        places, value, yerr=[[max(0.0, e) for e in side] for side in errors], fmt="none", ecolor=_INK, capsize=3
    )
    axes.plot(places, _column(sheet, "mean_of_ratios"), "o", color=_INK, markersize=4, label="mean of ratios")
    if expected is not None:
        by_name = {row["size"]: row for row in expected.rows}
        model = [_finite(by_name.get(name, {}).get("exact")) for name in names]
        axes.plot(places, model, "D", color=_MODEL, markersize=5, label="expected, exact form (modelled)")
    axes.set_xticks(places, names, rotation=35, ha="right")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("ETTR")
    axes.set_title("Effective training time ratio by size")
    axes.yaxis.grid(visible=True)
    axes.set_axisbelow(True)
    _legend(axes)


def _top(name: str) -> float:
    return float(name.split("-")[-1].lstrip(">"))


def _mttf(axes: Axes, sheets: _Sheets) -> None:
    sheet, projected = _first(sheets), sheets[1]
    rows = [row for row in sheet.rows if math.isfinite(_finite(row["mttf_hours"]))]
    none = [row for row in sheet.rows if not math.isfinite(_finite(row["mttf_hours"])) and row["mttf_low"] > 0]
    x = [_top(row["size"]) for row in rows]
    value = [row["mttf_hours"] for row in rows]
    up = [_finite(row["mttf_high"]) - row["mttf_hours"] for row in rows]
    errors = [[row["mttf_hours"] - row["mttf_low"] for row in rows], [0.0 if math.isnan(e) else e for e in up]]
    axes.errorbar(x, value, yerr=errors, fmt="o", color=_MARK, capsize=3, label="measured, 95 % (Garwood)")
    if none:
        lows = [row["mttf_low"] for row in none]
        axes.plot([_top(row["size"]) for row in none], lows, "^", color=_SOFT, label="no event: lower limit")
    model = [(_top(row["size"]), _finite(row["modelled_hours"])) for row in sheet.rows]
    model = [point for point in model if math.isfinite(point[1])]
    if model:
        axes.plot(*zip(*model, strict=True), color=_MODEL, label="modelled: 1 / (nodes x r_f)")
    if projected is not None and projected.rows:
        far = [row["gpus"] for row in projected.rows]
        axes.fill_between(
            far, _column(projected, "mttf_low"), _column(projected, "mttf_high"), color=_MODEL, alpha=0.18, lw=0
        )
        axes.plot(far, _column(projected, "mttf_hours"), "--", color=_MODEL, label="PROJECTION beyond observed sizes")
        axes.axvline(far[0] / math.sqrt(2), color=_SOFT, lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    if value or none:
        axes.set_yscale("log")
    ticks = sorted(
        {*(_top(row["size"]) for row in sheet.rows), *(row["gpus"] for row in (projected.rows if projected else ()))}
    )
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("GPUs (upper end of the class)")
    axes.set_ylabel("hours between failures")
    axes.set_title("MTTF by size")
    axes.grid(visible=True)
    axes.legend(loc="lower left", fontsize=9, frameon=True, framealpha=0.9, edgecolor=_GRID)


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _survival(unit: str) -> Callable[..., None]:
    def draw(axes: Axes, sheets: _Sheets) -> None:
        sheet = _first(sheets)
        names = list(dict.fromkeys(row["group"] for row in sheet.rows))[-_MOST_CURVES:]
        colours = mpl.colormaps["viridis"]([0.85 * at / max(1, len(names) - 1) for at in range(len(names))])
        for colour, name in zip(colours, names, strict=True):
            rows = [row for row in sheet.rows if row["group"] == name]
            time = [row["time"] for row in rows]
            axes.step(time, [row["alive"] for row in rows], where="post", color=colour, label=name, lw=1.6)
            low, high = [row["low"] for row in rows], [row["high"] for row in rows]
            axes.fill_between(time, low, high, step="post", color=colour, alpha=0.12, lw=0)
        axes.set_ylim(0, 1.03)
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
        axes.set_ylabel("share without a failure")
        axes.set_title(sheet.title)
        axes.grid(visible=True)
        _legend(axes)

    return draw


def _queue(axes: Axes, sheets: _Sheets) -> None:
    sheet = _first(sheets)
    places = list(range(len(sheet.rows)))
    floor = 1.0 / 3600
    for name, colour, width in (("p90", _USED, 0.66), ("median", _MARK, 0.36)):
        values = [max(value, floor) for value in _column(sheet, name)]
        axes.bar(places, values, width=width, color=colour, label=name)
    axes.plot(
        places, [max(value, floor) for value in _column(sheet, "mean")], "D", color=_MODEL, markersize=5, label="mean"
    )
    axes.set_yscale("log")
    axes.set_xticks(places, [row["size"] for row in sheet.rows], rotation=35, ha="right")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("wait [h]")
    axes.set_title("Wait before the first start")
    axes.yaxis.grid(visible=True)
    axes.set_axisbelow(True)
    _legend(axes)


def _investments(axes: Axes, sheets: _Sheets) -> None:
    sheet = _first(sheets)
    rows = list(reversed(sheet.rows[:10]))
    left = [0.0] * len(rows)
    for name, colour in (("detect", _MODEL), ("repair", _USED), ("recompute", _LOST), ("second_order", "#6d597a")):
        values = [row[name] for row in rows]
        axes.barh(range(len(rows)), values, left=left, color=colour, label=name.replace("_", " "), height=0.66)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), [f"{row['cause']} ({row['owner']})" for row in rows])
    axes.set_xlabel("GPU-hours")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axes.set_title("What each cause costs")
    axes.xaxis.grid(visible=True)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right")


_CHARTS: tuple[tuple[str, tuple[str, ...], Callable[..., None], str], ...] = (
    (
        "ledger",
        ("ledger",),
        _ledger,
        "Waterfall of the ledger: what was allocated, what each label took, what was kept.",
    ),
    ("ettr", ("ettr_size", "ettr_expected"), _ettr, "Measured from the ledger; expected from r_f and the assumptions."),
    (
        "rates",
        ("rates_by_size", "projections"),
        _mttf,
        "Points are measured; the line is a model; dashes are a projection.",
    ),
    (
        "rates",
        ("survival",),
        _survival("hours of run time"),
        "Kaplan-Meier by size with 95 % bands; other ends censored.",
    ),
    ("nodes", ("fault_survival",), _survival("days"), "Kaplan-Meier of gaps between faults of a node, 95 % bands."),
    ("investment", ("investment",), _investments, "The ten dearest causes by part of their cost."),
    ("queue", ("queue_wait",), _queue, "Logarithmic; waits under a second are drawn at one second."),
)
