"""The fleet report on a terminal: Rich tables, as wide as the terminal; plain lines where it is none."""

from __future__ import annotations

import io

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.service.fleet_sheet import FleetReport, Section, Sheet, cells

__all__ = ["report_text"]

_PLAIN_WIDTH = 150


def report_text(report: FleetReport, *, width: int | None = None, colour: bool = False) -> str:
    """The report as text of at most `width` columns (None: 150); sheets that are only drawn are left out."""
    out = io.StringIO()
    console = Console(
        file=out, width=width or _PLAIN_WIDTH, force_terminal=colour, no_color=not colour, highlight=False
    )
    console.print(Text(report.title, style="bold"))
    for line in report.about:
        console.print(Text(line))
    for section in report.sections:
        _section(console, section)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _section(console: Console, section: Section) -> None:
    console.print()
    console.rule(Text(section.title, style="bold"), align="left", characters="─")
    for words in section.words:
        console.print(Padding(Text(words), (0, 0, 0, 2)))
    for one in section.sheets:
        if one.rows and not one.drawn:
            console.print()
            console.print(Padding(_table(one), (0, 0, 0, 2)))


def _table(one: Sheet) -> Table:
    headings, rows = cells(one)
    table = Table(
        title=Text(one.title, style="bold"), title_justify="left", box=None, pad_edge=False, header_style="dim"
    )
    table.caption, table.caption_justify = Text(one.note, style="dim") if one.note else None, "left"
    for column, heading in enumerate(headings):
        wordy = any(row[column][:1].isalpha() for row in rows)
        table.add_column(Text(heading), justify="left" if wordy or not column else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
