"""The fleet report as one self-contained HTML file: words, charts as inline SVG, tables. No script, nothing fetched."""

from __future__ import annotations

from typing import Any

import jinja2

from keepstep.service.fleet_report_charts import charts_of
from keepstep.service.fleet_sheet import FleetReport, Sheet, cells

__all__ = ["report_html"]


def report_html(report: FleetReport) -> str:
    """The whole document. Everything but the charts is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("keepstep.service", "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    tables = {
        section.key: [_table(one) for one in section.sheets if one.rows and not one.drawn]
        for section in report.sections
    }
    template = environment.get_template("fleet_report.html.j2")
    return template.render(report=report, tables=tables, charts=charts_of(report))


def _table(one: Sheet) -> dict[str, Any]:
    headings, rows = cells(one)
    wordy = [not column or any(row[column][:1].isalpha() for row in rows) for column in range(len(headings))]
    return {
        "title": one.title,
        "note": one.note,
        "headings": headings,
        "rows": rows,
        "wordy": wordy,
        "projection": one.key == "projections",
    }
