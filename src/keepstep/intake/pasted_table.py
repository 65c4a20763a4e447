"""A small table with one row a rank, as people paste it between other lines: Markdown, commas, or columns of spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.intake.log_lines import Line
from keepstep.intake.phase_text import phase_word

__all__ = ["TableRows"]

_MEMBER = re.compile(r"^(?:global[ _]?)?(?:rank|worker|gpu|proc(?:ess)?)s?(?:[ _]?id)?$", re.IGNORECASE)
_ROW_MEMBER = re.compile(r"^(?:rank|worker|gpu)?[ _#-]?(\d{1,6})$", re.IGNORECASE)
_NUMBER = re.compile(r"^(-?\d+(?:\.\d+)?)\s*(?:ms|us|s|MHz|C|W|GB/s|%)?$")
_UNIT = re.compile(r"[_ (]+(?P<unit>ms|us|s|sec|seconds)\)?$", re.IGNORECASE)
_MOST_ROWS = 100_000
_FEWEST_ROWS = 3


class TableRows:
    """Follows lines; gives one event for each column of a table that has ended."""

    def __init__(self) -> None:
        """No table has begun."""
        self._names: list[str] = []
        self._rows: list[tuple[int, list[str]]] = []

    @property
    def busy(self) -> bool:
        """Whether a table is being read."""
        return bool(self._names)

    def feed(self, line: Line) -> Iterator[tuple[str, dict[str, str]]]:
        """(kind, fields) of the columns of a table that ended before this line."""
        cells = _cells(line.text)
        if self._names and set(line.text) <= set("|-+:= "):
            return
        member = _ROW_MEMBER.match(cells[0]) if self._names and len(cells) == len(self._names) else None
        if member is not None and len(self._rows) < _MOST_ROWS:
            self._rows.append((int(member[1]), cells[1:]))
            return
        yield from self.finish()
        if len(cells) > 1 and _MEMBER.match(cells[0]) and not any(_NUMBER.match(cell) for cell in cells):
            self._names = cells

    def finish(self) -> Iterator[tuple[str, dict[str, str]]]:
        """(kind, fields) of the columns of the table that was being read. Ranks that come twice are no such table."""
        rows, names = self._rows, self._names
        self._rows, self._names = [], []
        if len(rows) < _FEWEST_ROWS or len({rank for rank, _ in rows}) != len(rows):
            return
        for column, name in enumerate(names[1:]):
            values = [(rank, _NUMBER.match(cells[column])) for rank, cells in rows]
            phase = phase_word(name)
            if phase and all(match for _, match in values):
                unit = _UNIT.search(name)
                yield (
                    "phase_table",
                    {
                        "values": " ".join(f"{rank}:{match[1]}" for rank, match in values if match),
                        "name": name[:80],
                        "phase": phase,
                        **({"unit": unit["unit"]} if unit else {}),
                    },
                )


def _cells(text: str) -> list[str]:
    stripped = text.strip().strip("|").strip()
    for separator in (r"\s*\|\s*", r"\s*,\s*", r"\t+", r"\s{2,}", r"\s+"):
        cells = re.split(separator, stripped)
        if len(cells) > 1:
            return cells
    return [stripped]
