"""Slurm's way of writing many host names: `n[1-4,7],gpu[01-02]-ib`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keepstep.errors import RecordError

__all__ = ["MAX_HOSTS", "checked_names", "every_host", "expand_hosts"]

MAX_HOSTS = 200_000
"""Most names one list may stand for."""

_NO_HOSTS = frozenset({"", "None", "None assigned", "(null)", "N/A", "Unknown"})
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z", re.ASCII)
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def checked_names(names: Iterable[str], *, where: str = "") -> None:
    """Raises RecordError where one of `names` has control characters: a name is printed, and exported to shells."""
    for name in names:
        if not name.isprintable():
            raise RecordError(f"the name {name[:60]!a} has characters that cannot be printed", where=where)


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that `text` stands for, in its order, each once.

    `None assigned` and the like are no hosts. Raises RecordError for a list that is not well formed or too long.
    """
    return tuple(dict.fromkeys(every_host(text)))


def every_host(text: str) -> list[str]:
    """As `expand_hosts`, but a name that `text` gives twice is there twice."""
    if "[" not in text and "," not in text:
        return [] if text in _NO_HOSTS else [text]
    names: list[str] = []
    for part in _parts(text):
        names += _expand(part)
        if len(names) > MAX_HOSTS:
            raise RecordError(f"a list of more than {MAX_HOSTS} hosts", where=text[:60])
    return names


def _parts(text: str) -> list[str]:
    """`text` cut at the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise RecordError("brackets do not match", where=text[:60])
        if letter == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    if depth:
        raise RecordError("a bracket is not closed", where=text[:60])
    return [part for part in [*parts, text[begin:]] if part]


def _expand(part: str) -> list[str]:
    """The names of one part; several brackets multiply."""
    names = [""]
    position = 0
    for match in _BRACKET.finditer(part):
        literal = part[position : match.start()]
        numbers = [number for item in match[1].split(",") for number in _numbers(item, part)]
        if len(names) * len(numbers) > MAX_HOSTS:
            raise RecordError(f"a list of more than {MAX_HOSTS} hosts", where=part[:60])
        names = [f"{name}{literal}{number}" for name in names for number in numbers]
        position = match.end()
    return [name + part[position:] for name in names]


def _numbers(item: str, part: str) -> list[str]:
    match = _RANGE.match(item)
    if match is None:
        raise RecordError(f"{item[:20]!r} is no range of numbers", where=part[:60])
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
        raise RecordError(f"{item[:20]!r} is no range of numbers", where=part[:60])
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
