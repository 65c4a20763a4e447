"""A table with one row for each host and a column for each tier of switches above it (alibaba-lingjun-dataset-2023)."""

from __future__ import annotations

import csv
import io

from keepstep.errors import RecordError
from keepstep.intake.topology_assumed import Assumed
from keepstep.records.topology import Cable, Port, Switch, Topology

__all__ = ["looks_like_switch_table", "read_switch_table"]

_MOST_ROWS = 1_000_000
_LINES_LOOKED_AT = 4
_SEPARATORS = ",;\t"


def looks_like_switch_table(text: str) -> bool:
    """Whether the first line is a header of two to eight short names, with a separator that later lines have too."""
    lines = text.splitlines()[:_LINES_LOOKED_AT]
    if len(lines) < 2:
        return False
    separator = _separator(lines[0])
    names = lines[0].split(separator)
    return (
        2 <= len(names) <= 8
        and any(separator in line for line in lines[1:])
        and all(0 < len(name.strip()) < 40 and "=" not in name for name in names)
    )


def read_switch_table(text: str, assumed: Assumed, *, where: str = "") -> Topology:
    """The first column names hosts; of the others the one with the most different switches is the lowest tier;
    columns with equally many keep the direction that the outermost two have.

    Every switch is joined to those it shares a row with one tier up. Raises RecordError for rows that do not fit the
    header, and hosts listed twice.
    """
    rows = csv.reader(io.StringIO(text), delimiter=_separator(text.splitlines()[0]))
    header = [name.strip() for name in next(rows)]
    table: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != len(header) or not all(cell.strip() for cell in row):
            raise RecordError(f"{len(row)} filled cells expected {len(header)}", where=f"{where} line {number}".strip())
        host, *above = (cell.strip() for cell in row)
        if table.setdefault(host, above) != above:
            raise RecordError(f"host {host!r} is listed twice with different switches", where=where)
        if number > _MOST_ROWS:
            raise RecordError(f"more than {_MOST_ROWS} rows", where=where)
    counts = [len({above[column] for above in table.values()}) for column in range(len(header) - 1)]
    columns = range(len(counts)) if counts[0] >= counts[-1] else reversed(range(len(counts)))
    order = sorted(columns, key=lambda column: -counts[column])
    return _topology(table, order, header=header, assumed=assumed)


def _topology(table: dict[str, list[str]], order: list[int], *, header: list[str], assumed: Assumed) -> Topology:
    def name(column: int, value: str) -> str:
        return (
            value
            if len({column for column in order if value in values[column]}) == 1
            else f"{header[column + 1]}-{value}"
        )

    values = {column: {above[column] for above in table.values()} for column in order}
    switches: dict[str, Switch] = {}
    cables: dict[tuple[str, str], Cable] = {}
    ports = []
    for host, above in table.items():
        names = [name(column, above[column]) for column in order]
        for tier, switch in enumerate(names, 1):
            switches.setdefault(switch, Switch(switch, tier))
        for lower, upper in zip(names, names[1:], strict=False):
            cables.setdefault((lower, upper), Cable(lower, upper, assumed.cable_gbps))
        ports.append(Port(host, "nic0", names[0], assumed.gbps))
    tiers = " < ".join(header[column + 1] for column in order)
    notes = (
        f"no capacities in the table: {assumed.gbps:g} Gbit/s a port, {assumed.cable_gbps:g} a cable assumed",
        f"tiers by the number of switches: {tiers}; switches of one row are taken to be joined",
    )
    return Topology("table", tuple(switches.values()), tuple(ports), tuple(cables.values()), "host,switch table", notes)


def _separator(line: str) -> str:
    return max(_SEPARATORS, key=line.count)
