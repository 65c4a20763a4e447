"""What a fleet report consists of: sections of words and sheets; how a row is shown. Nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["FleetReport", "Section", "Sheet", "cells", "sheet"]

_Row = dict[str, Any]
_Shown = tuple[tuple[str, str], ...]


class Sheet(msgspec.Struct, frozen=True):
    """Rows with a title and a note that says what the numbers mean.

    `shown` pairs a heading with a template over a row's fields, for people; machines get all fields. A sheet that is
    only `drawn` appears in charts and in JSON.
    """

    key: str
    title: str
    rows: tuple[_Row, ...]
    note: str = ""
    shown: _Shown = ()
    drawn: bool = False


class Section(msgspec.Struct, frozen=True):
    """One question of the report and its answer: words first, then sheets."""

    key: str
    title: str
    words: tuple[str, ...]
    sheets: tuple[Sheet, ...] = ()


class FleetReport(msgspec.Struct, frozen=True):
    """The whole report: what it is about, and its sections in order."""

    title: str
    about: tuple[str, ...]
    sections: tuple[Section, ...]

    def sheet(self, key: str) -> Sheet | None:
        """The sheet of that key, None if there is none."""
        return next((one for section in self.sections for one in section.sheets if one.key == key), None)


def sheet(
    key: str, title: str, *, rows: Iterable[Any], note: str = "", shown: _Shown = (), drawn: bool = False
) -> Sheet:
    """A sheet of structs or mappings."""
    plain = tuple(dict(row) if isinstance(row, Mapping) else msgspec.structs.asdict(row) for row in rows)
    return Sheet(key, title, plain, note, shown, drawn)


class _Value:
    """A value in a template: what is unknown is a dash, what is endless says so."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, how: str) -> str:
        value = self.value
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        if isinstance(value, float) and math.isinf(value):
            return "∞" if value > 0 else "-∞"
        return _significant(value) if not how and isinstance(value, float) else format(value, how)


def _significant(value: float) -> str:
    """Four significant digits, thousands apart, no exponent where it is avoidable."""
    if value == 0 or 1e-4 <= abs(value) < 1e12:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:,.{min(digits, 6)}f}"
    return f"{value:.3g}"


def cells(table: Sheet) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Headings and rows as text."""
    shown = table.shown or tuple(
        (name.replace("_", " "), "{" + name + ("}" if not isinstance(value, int) else ":,}"))
        for name, value in (table.rows[0] if table.rows else {}).items()
    )
    rows = []
    for row in table.rows:
        values = {name: _Value(value) for name, value in row.items()}
        rows.append(tuple(template.format(**values) for _, template in shown))
    return tuple(heading for heading, _ in shown), tuple(rows)
