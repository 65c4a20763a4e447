"""A whole text of sacct: its header, its rows, and what its columns leave open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken
from keepstep.intake.delimited_rows import MAX_COLUMNS, Layout, read_rows
from keepstep.intake.sacct_fields import COMMAND, FREE_TEXT, USED, delimiter_of, missing
from keepstep.intake.sacct_rows import sacct_taken
from keepstep.intake.sacct_values import looks_right

__all__ = ["MAX_HEADER_BYTES", "layout_of", "read_sacct"]

MAX_HEADER_BYTES = 64 * 1024


def read_sacct(stream: BinaryIO, *, zone: str, cluster: str, where: str) -> Iterator[Taken]:
    """The attempts and steps of `stream`, piece by piece; the first piece carries notes about missing columns.

    `zone` is the time zone of the machine that printed the text, `cluster` names the cluster where rows do not.
    Raises RecordError if it is no text of sacct, or lacks columns without which nothing can be said.
    """
    layout = layout_of(stream.readline(MAX_HEADER_BYTES + 1), where=where)
    yield Taken(notes=tuple(missing(set(layout.columns), where=where)))
    for block in read_rows(stream, layout):
        yield sacct_taken(block, zone=zone, cluster=cluster)


def layout_of(header: bytes, *, where: str) -> Layout:
    """How a text with this first line is laid out. Raises RecordError if it is no header of sacct."""
    if len(header) > MAX_HEADER_BYTES:
        raise RecordError(f"the first line has more than {MAX_HEADER_BYTES} bytes", where=where, remedy=COMMAND)
    text = header.decode(errors="replace").strip("\r\n").removeprefix("﻿")
    delimiter = delimiter_of(text.strip(" ") if "|" not in text else text)
    if delimiter is None or delimiter.strip() == "" and "\t" not in delimiter:
        raise RecordError("the first line names no columns of sacct", where=where, remedy=f"export with: {COMMAND}")
    names = [name.strip().lower() for name in text.split(delimiter)]
    closed = len(names) > 1 and names[-1] == ""
    if closed:
        names.pop()
    if len(names) > MAX_COLUMNS:
        raise RecordError(f"{len(names)} columns, at most {MAX_COLUMNS} are read", where=where)
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:  # sacct prints a column as often as it is asked for
            names[index] = f"{name}~{seen[name]}"
    return Layout(columns=tuple(names), delimiter=delimiter, closed=closed, use=USED, free=FREE_TEXT, fits=looks_right)
