"""One journal record as one line of JSON, and back.

A line is an object with `record` (the class name), `schema`, and the fields that differ from their defaults, ended
by a newline. Only the last line of a journal can be torn, by a crash in mid-write; a bad line with others after it
is damage and is not passed over in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from keepstep.errors import RecordError, TornRecord
from keepstep.records.events import SCHEMA, Event, OrderRecord, without_secret
from keepstep.records.schema import migrate, parse_version

__all__ = ["MAX_LINE_BYTES", "decode_line", "decode_lines", "encode_line"]

MAX_LINE_BYTES = 8 * 1024 * 1024
"""Longest line, newline included, that is written or read."""


class _Head(msgspec.Struct):
    record: str
    schema: str


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_events = msgspec.json.Decoder(Event)
_objects = msgspec.json.Decoder(dict[str, Any])
_CURRENT = parse_version(SCHEMA)
_KNOWN = frozenset(kind.__name__ for kind in Event.__args__)


def encode_line(event: Event) -> bytes:
    """`event` as one line with its newline. Secrets are blanked.

    Raises RecordError if the line could not be read back (a number that is not finite, a wrong type) or is too long.
    """
    if isinstance(event, OrderRecord):
        event = without_secret(event)
    try:
        line = _encoder.encode(event) + b"\n"
    except (TypeError, ValueError, OverflowError, msgspec.EncodeError) as error:
        raise RecordError(f"{type(event).__name__} cannot be written: {error}") from error
    _check_length(len(line))
    try:
        _events.decode(line)
    except msgspec.DecodeError as error:
        raise RecordError(f"{type(event).__name__} would not be readable: {error}") from error
    return line


def decode_line(line: bytes) -> Event | None:
    """The record in `line`; None for a record of a newer minor schema that this version does not know.

    Raises SchemaTooNew for a newer major version, TornRecord for what is not even JSON, and RecordError for JSON
    that is not a record.
    """
    _check_length(len(line))
    try:
        head = _heads.decode(line)
        version = parse_version(head.schema)
        if version < _CURRENT:
            line = _encoder.encode(migrate(_objects.decode(line), version))
        elif version > _CURRENT and head.record not in _KNOWN:
            return None
        return _events.decode(line)
    except msgspec.ValidationError as error:
        raise RecordError(f"not a journal record: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TornRecord(f"not a journal record: {error}") from error
    except (TypeError, AttributeError, ValueError) as error:  # a migration met fields of a wrong type
        raise RecordError(f"not a journal record of its schema: {error}") from error


def decode_lines(lines: Iterable[bytes], *, where: str = "") -> Iterator[Event]:
    """The records in `lines` (each with its newline), one by one; records not known here are left out.

    Raises TornRecord after the last whole record if the last line is torn, and RecordError (with the line's number)
    for damage before it.
    """
    torn: TornRecord | None = None
    for number, line in enumerate(lines, 1):
        if torn is not None:
            raise RecordError(torn.what, where=torn.where, remedy="the journal is damaged in the middle") from torn
        place = f"{where} line {number}".strip()
        try:
            event = _whole(line)
        except TornRecord as error:
            torn = TornRecord(error.what, where=place, remedy="everything before it was kept")
        except RecordError as error:
            raise type(error)(error.what, where=place, remedy=error.remedy) from error
        else:
            if event is not None:
                yield event
    if torn is not None:
        raise torn


def _whole(line: bytes) -> Event | None:
    if not line.endswith(b"\n"):
        raise TornRecord(f"the last record is cut off after {len(line)} bytes")
    return decode_line(line)


def _check_length(length: int) -> None:
    if length > MAX_LINE_BYTES:
        raise RecordError(f"a journal line has {length} bytes, at most {MAX_LINE_BYTES} are allowed")
