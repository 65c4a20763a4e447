"""JSON documents of other tools: bounded, cut into elements, and salvaged where they end too early."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.delimited_rows import Aside

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "Elements",
    "element_batches",
    "elements",
    "flag_list",
    "json_lines",
    "load_bytes",
    "number",
    "text",
]

MAX_DOCUMENT_BYTES = 1 << 30
"""Largest JSON document that is read at once; larger exports are to be cut by time."""
_MAX_LINE = 16 * 1024 * 1024
_MAX_DEPTH = 200
_REMEDY = "cut the export into shorter times"


class Elements(msgspec.Struct, frozen=True):
    """The elements of a list in a document, with the number of each; the rest of the document; what went aside."""

    items: tuple[tuple[int, dict[str, Any]], ...]
    rest: dict[str, Any]
    aside: tuple[Aside, ...]


def load_bytes(stream: BinaryIO, *, where: str) -> bytes:
    """All of `stream`. Raises RecordError if it is larger than is read at once."""
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise RecordError(f"a JSON document of more than {MAX_DOCUMENT_BYTES} bytes", where=where, remedy=_REMEDY)
    return data


def elements(data: bytes, key: str, *, where: str) -> Elements:
    """The objects in the list `key` of the document, or of the document if that is itself a list.

    A document that ends too early gives its whole elements; the rest goes aside. Elements that are no objects, or
    nested too deep, go aside. Raises RecordError if there is no such list.
    """
    text = data.decode("utf-8", "replace")
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return _salvaged(text, key, where=where, why=str(error))
    found = document if isinstance(document, list) else document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise RecordError(f"no list {key!r} in the document", where=where)
    rest = {name: value for name, value in document.items() if name != key} if isinstance(document, dict) else {}
    good = tuple((index, item) for index, item in enumerate(found, 1) if isinstance(item, dict))
    bad = [
        Aside(i, "no object", json.dumps(item)[:200]) for i, item in enumerate(found, 1) if not isinstance(item, dict)
    ]
    return Elements(good, rest, tuple(bad))


def element_batches(data: bytes, key: str, *, where: str, size: int = 2000) -> Iterator[Elements]:
    """Like `elements`, in batches of `size`: only the text and one batch are in memory at a time."""
    text = data.decode("utf-8", "replace")
    listed = text.lstrip().startswith("[")
    match = re.search(r"\[" if listed else rf'"{re.escape(key)}"\s*:\s*\[', text)
    if match is None:
        raise RecordError(f"no list {key!r} in the document", where=where)
    decoder, position, number = json.JSONDecoder(), match.end(), 0
    items: list[tuple[int, dict[str, Any]]] = []
    aside: list[Aside] = []
    while (position := _next(text, position)) < len(text) and text[position] != "]":
        number += 1
        try:
            item, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            reason = f"the document is cut off or damaged after {number - 1} elements"
            aside.append(Aside(number, reason, text[position : position + 200]))
            break
        if isinstance(item, dict):
            items.append((number, item))
        else:
            aside.append(Aside(number, "no object", str(item)[:200]))
        if len(items) >= size:
            yield Elements(tuple(items), {}, tuple(aside))
            items, aside = [], []
    if position >= len(text):
        aside.append(Aside(number + 1, f"the document is cut off or damaged after {number} elements", ""))
    yield Elements(tuple(items), {}, tuple(aside))


def _next(text: str, position: int) -> int:
    """The place of the next letter that is neither blank nor a comma."""
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _salvaged(text: str, key: str, *, where: str, why: str) -> Elements:
    """The whole elements of a broken document."""
    begin = text.find("[") if text.lstrip().startswith("[") else text.find("[", max(text.find(f'"{key}"'), 0))
    if begin < 0 or (f'"{key}"' not in text and not text.lstrip().startswith("[")):
        raise RecordError(f"no JSON: {why[:120]}", where=where)
    items: list[tuple[int, dict[str, Any]]] = []
    decoder, position = json.JSONDecoder(), begin + 1
    while True:
        position = _next(text, position)
        try:
            item, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        if isinstance(item, dict):
            items.append((len(items) + 1, item))
    if text[position : position + 1] != "]":
        reason = f"the document is cut off or damaged after {len(items)} elements"
        return Elements(tuple(items), {}, (Aside(len(items) + 1, reason, text[position : position + 200]),))
    return Elements(tuple(items), {}, (Aside(len(items) + 1, f"damaged behind the list: {why[:100]}", ""),))


def json_lines(stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | Aside]]:
    """Objects of a file with one JSON object a line, with their line; what is none comes as Aside."""
    line, number = stream.readline(_MAX_LINE), 0
    while line:
        number += 1
        if line.strip():
            yield number, _object(line, number)
        while line and not line.endswith(b"\n") and len(line) == _MAX_LINE:
            line = stream.readline(_MAX_LINE)
        line = stream.readline(_MAX_LINE)


def _object(line: bytes, number: int) -> dict[str, Any] | Aside:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return Aside(number, f"no JSON: {str(error)[:100]}", line[:400].decode(errors="replace")[:200])
    return value if isinstance(value, dict) else Aside(number, "no object", str(value)[:200])


def number(value: Any) -> int | None:
    """A number of Slurm's JSON: plain, or `{set, infinite, number}`; None where it is not set."""
    if isinstance(value, dict):
        return number(value.get("number")) if value.get("set") and not value.get("infinite") else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return None
    return whole if abs(whole) < 2**62 else None


def text(value: Any) -> str:
    """A text; empty for null and for what is no text or number."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def flag_list(value: Any) -> list[str]:
    """Words of a list or of one text, in upper case."""
    words = value if isinstance(value, list) else [value]
    return [str(word).upper() for word in words if isinstance(word, str) and word]
