"""The report over a fleet directory: every section in order, as one value; printed by its siblings."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from keepstep.errors import UsageError
from keepstep.service.fleet_engine import Engine
from keepstep.service.fleet_report_checks import checks_section
from keepstep.service.fleet_report_data import FleetData, ReportOptions, load
from keepstep.service.fleet_report_faults import node_faults
from keepstep.service.fleet_report_lemons import lemons_section
from keepstep.service.fleet_report_losses import investment_section, second_order_section
from keepstep.service.fleet_report_nodes import nodes_section
from keepstep.service.fleet_report_periods import periods_section
from keepstep.service.fleet_report_queue import queue_section
from keepstep.service.fleet_report_rates import moment_given, rates_section
from keepstep.service.fleet_report_sources import sources_section
from keepstep.service.fleet_report_text import report_text
from keepstep.service.fleet_report_time import ettr_section, ledger_section
from keepstep.service.fleet_sheet import FleetReport, Section

__all__ = ["ReportOptions", "fleet_report", "printed_report", "report_json", "report_of_fleet", "write_page"]

_OF_ATTEMPTS = (
    ledger_section,
    ettr_section,
    rates_section,
    second_order_section,
    investment_section,
    queue_section,
    periods_section,
)
_OF_NODES = (nodes_section, lemons_section, checks_section)


def report_of_fleet(
    directory: Path,
    options: ReportOptions,
    *,
    engine: Engine = "local",
    parts: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> FleetReport:
    """Read `directory` and make its report; any engine and any number of parts give the same one. Raises as `load`.

    `say` is told the progress.
    """
    return fleet_report(load(directory, options, engine=engine, parts=parts, say=say), say=say)


def printed_report(
    directory: Path,
    options: ReportOptions,
    *,
    style: str = "text",
    engine: Engine = "local",
    terminal: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """The report as `text`, `json` or `html`. On a `terminal` text has its width and colours.

    `say` is told the progress. Raises UsageError for a date that is none, before any work.
    """
    for date in options.changes:
        moment_given(date)
    report = report_of_fleet(directory, options, engine=engine, say=say)
    if style == "json":
        return report_json(report)
    if style == "html":
        from keepstep.service.fleet_report_html import report_html  # drawing loads matplotlib

        return report_html(report)
    console = Console()
    on_screen = terminal and console.is_terminal
    return report_text(report, width=console.width if on_screen else None, colour=on_screen)


def fleet_report(data: FleetData, *, say: Callable[[str], None] = lambda _: None) -> FleetReport:
    """All sections; those about attempts are left out where a fleet has none. `say` is told each that is done."""

    def done(section: Section) -> Section:
        say(f"done: {section.title}")
        return section

    sections = [done(section(data)) for section in _OF_ATTEMPTS] if len(data.times.run) else []
    known = node_faults(data)
    sections += [done(section(data, known)) for section in _OF_NODES]
    sections.append(done(sources_section(data)))
    about = [f"fleet directory {data.store.directory.name}"]
    if len(data.times.run):
        about.append(f"{_day(data.first)} to {_day(data.last)} (UTC)")
    else:
        about.append("no attempt on GPUs is on record: sections about jobs are left out")
    return FleetReport("Fleet report", tuple(about), tuple(sections))


def write_page(path: Path, text: str) -> None:
    """Write a report to `path`. Raises UsageError if it cannot be written there."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _day(moment: int) -> str:
    return datetime.fromtimestamp(moment / 1e6, UTC).strftime("%Y-%m-%d")


def report_json(report: FleetReport) -> str:
    """The report for machines; numbers that are not finite become null (unknown) or "inf"."""
    body = {
        "title": report.title,
        "about": report.about,
        "sections": {section.key: _section(section) for section in report.sections},
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1).decode()


def _section(section: Section) -> dict[str, Any]:
    sheets = {
        one.key: {"title": one.title, "note": one.note, "rows": [_row(row) for row in one.rows]}
        for one in section.sheets
    }
    return {"title": section.title, "words": section.words, "sheets": sheets}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None if isinstance(value, float) and math.isnan(value) else value
