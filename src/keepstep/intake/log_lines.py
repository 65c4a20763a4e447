"""Lines of a log as text: streamed, bounded, without colours and control characters, with who spoke."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import BinaryIO

import msgspec

__all__ = ["LONGEST_LINE", "Line", "Speaker", "clean", "lines_of", "seconds_of", "speaker_of"]

LONGEST_LINE = 16_384
"""Bytes of a line that are looked at; the rest of a longer line is passed over."""

_PIECES_OF_A_LINE = 200
"""Parts of one line between carriage returns (a progress bar) that are looked at: the last ones."""

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LOST_ESCAPE = re.compile(r"(?<![\w\[])\[\d{1,2}(?:;\d{1,3})*m(?=\S)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LONG_NUMBER = re.compile(r"(\d{64})\d+")
_MAY_HOLD_ONE = 4000
"""Characters of a line from which on numbers are cut to 64 digits: nobody counts so far, and Python reads 4,300."""
_GLUED = re.compile(r"(?<=\S)\s*(?=\[rank\d+\]:\s?\[[EWIF]\s?\d*)")


class Line(msgspec.Struct, frozen=True):
    """One line; `number` counts from 1. Several parts of one line in the file have the same number."""

    number: int
    text: str


class Speaker(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a line, as far as its prefix tells."""

    rank: int | None = None
    """Global rank, as the launcher or torch prints it."""
    local: int | None = None
    """A number in brackets that counts the processes or devices of a node."""
    node: str | None = None
    pid: int | None = None
    wall: float | None = None


def clean(raw: bytes | str) -> str:
    """Text without colours and control characters; bytes that are not UTF-8 become the replacement character."""
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if "[0m" in text or "[3" in text or "[1;" in text:
        text = _LOST_ESCAPE.sub("", text)
    text = text.rstrip()
    if len(text) > _MAY_HOLD_ONE:
        text = _LONG_NUMBER.sub(r"\1", text)
    return text if text.isprintable() else _CONTROL.sub("", text).rstrip()


def lines_of(stream: BinaryIO) -> Iterator[Line]:
    """The lines of an open file. Ends quietly where the file is damaged (a torn gzip raises EOFError to the caller)."""
    number = 0
    wide = _wide(stream)
    while raw := stream.readline(LONGEST_LINE):
        number += 1
        whole = raw.endswith(b"\n")
        while not whole and (rest := stream.readline(LONGEST_LINE)):
            whole = rest.endswith(b"\n")
        if wide:
            raw = raw.replace(b"\0", b"")
        for piece in raw.split(b"\r")[-_PIECES_OF_A_LINE:] if b"\r" in raw else (raw,):
            text = clean(piece)
            if text.find("[rank", 1) > 0:
                yield from (Line(number, part) for part in _GLUED.split(text) if part)
            elif text:
                yield Line(number, text)


def _wide(stream: BinaryIO) -> bool:
    """Whether the file is UTF-16 (Windows shells write it); its ASCII then shows with zero bytes between."""
    return bool(getattr(stream, "peek", None)) and stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")  # type: ignore[attr-defined]


_MPI = re.compile(r"\[(?:\d+),(?P<rank>\d+)\]<std(?:out|err)>")
_TORCH = re.compile(r"\[rank[ =:]?(?P<rank>\d+)\]", re.IGNORECASE)
_SAID = re.compile(
    (
        r"^(?:[^A-Za-z]|\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|global|root|T"
        r"|Z)\b)*rank[ =:#]{0,2}(?P<rank>\d{1,6})\b(?=[^\w.]|$)"
    ),
    re.IGNORECASE,
)
_SRUN = re.compile(r"^\s*(?P<rank>\d{1,6}): ")
_ROLE = re.compile(r"^\s*\[(?:default|trainer|worker|\w*role\w*)?(?P<local>\d{1,4})\]:?(?=\s|$|\[)")
_RAY = re.compile(r"\([\w.]+\s?(?:rank=(?P<rank>\d+)[, ]+)?pid=(?P<pid>\d+)(?:, ip=(?P<node>[\w.:-]+))?\)")
_NCCL = re.compile(r"(?P<node>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[(?P<local>-?\d+)\]")
_KERNEL = re.compile(r"(?P<node>[A-Za-z][\w.-]*) (?:kernel|slurmstepd|slurmd|nvidia-\w+|systemd)(?:\[\d+\])?:")
_HOST = re.compile(r"^(?:\[[^\]]*\]\s*)?(?P<node>[a-z][a-z.-]*[\w.-]*\d[\w.-]*):\s", re.IGNORECASE)
_NOT_HOSTS = re.compile(
    r"^(?:rank|cuda|step|epoch|iter|stage|default|experiment|run|layer)"
    r"|^(?:gpu|ib|eth|en[sop]\w*|mlx\d\w*|hfi|bond)\d+$|^(?:worker|group|task|test|v|error|phase)[-_]?\d+$",
    re.IGNORECASE,
)
_DATE = re.compile(r"(?P<day>\d{4}-\d\d-\d\d|\d{4}/\d\d/\d\d)[T ](?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)")
_PREFIX = 160


def speaker_of(text: str) -> Speaker:
    """Who wrote a line, by the prefixes that launchers, NCCL, Ray, srun, MPI and system logs put in front."""
    head = text[:_PREFIX]
    found: dict[str, str | None] = {}
    for form in (_MPI, _TORCH, _SRUN, _RAY, _NCCL, _KERNEL, _ROLE, _HOST, _SAID):
        match = form.search(head)
        if match and not (form is _HOST and _NOT_HOSTS.search(match["node"])):
            for key, value in match.groupdict().items():
                found.setdefault(key, value)
    return Speaker(
        rank=_number(found.get("rank")),
        local=_number(found.get("local")),
        node=found.get("node"),
        pid=_number(found.get("pid")),
        wall=seconds_of(head),
    )


def seconds_of(text: str) -> float | None:
    """Seconds since 1970 of the first full date in `text`, read as UTC; None if there is none that exists."""
    match = _DATE.search(text)
    if match is None:
        return None
    time = match["time"].replace(",", ".")[:15]
    try:
        return datetime.fromisoformat(f"{match['day'].replace('/', '-')}T{time}+00:00").timestamp()
    except ValueError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdigit() and len(text) < 10 else None
