"""Writes docs/records.md from the code: `python -m keepstep.records.document > docs/records.md`.

A test compares the file with this, so that the document cannot fall behind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as shapes

from keepstep.records import messages
from keepstep.records.events import SCHEMA, Event, Record, Suspect
from keepstep.records.journal_line import MAX_LINE_BYTES
from keepstep.records.ring import (
    Activity,
    GroupState,
    OpSlot,
    PeerSlot,
    Ring,
    RingHeader,
    SlotStatus,
    SpanKind,
    SpanSlot,
)
from keepstep.records.ring_layout import LAYOUTS
from keepstep.records.schema import MIGRATIONS

__all__ = ["records_document"]

_INTRODUCTION = f"""# Records

Generated from the code by `python -m keepstep.records.document > docs/records.md`; do not edit.

## The journal

`journal.jsonl` in a run directory holds one JSON object a line, at most {MAX_LINE_BYTES} bytes long, in UTF-8. `record`
names what it is, `schema` the version it was written in, now **{SCHEMA}**. Fields that have their default are left
out; bytes are base64; keys of a map are strings. A field without a default is always there.

- A reader takes every older version with a migration: {", ".join(f"{a}.{b}" for a, b in sorted(MIGRATIONS))}. It takes
  newer minor versions of its own major version and passes over fields and records it does not know. It refuses a newer
  major version.
- Only the last line can be torn by a crash. Everything before it counts; the writer cuts it off when it opens the
  journal again. Damage before the end is an error.
- The data-plane secret of a `Welcome` is blanked before it is written.
"""
_MESSAGES = f"""## Messages

Between members, agents and controller, in MessagePack, tagged by `kind`, at most {messages.MAX_MESSAGE_BYTES} bytes.
Facts and orders appear in the journal as `FactRecord.fact` and `OrderRecord.order`.
"""
_RING = """## The recorder's ring

Shared memory that a member writes and its agent reads, also after the member's death. Little endian. Times are
nanoseconds of CLOCK_MONOTONIC on the member's host; wall clock = monotonic + `offset_ns`. A slot counts only if it
holds the index its place must hold (`index+1` is written last). The peer slots of an operation follow it. Private
state counts only if `lock` is even and not 0 and the checksum is right.
"""

_SIMPLE: tuple[tuple[type, str], ...] = (
    (shapes.IntType, "int"),
    (shapes.FloatType, "float"),
    (shapes.StrType, "str"),
    (shapes.BytesType, "bytes"),
    (shapes.BoolType, "bool"),
    (shapes.NoneType, "null"),
)
_UNITS = (
    ("_ns", "ns"),
    ("_s", "s"),
    ("nbytes", "B"),
    ("bytes_sent", "B"),
    ("bytes_received", "B"),
    ("bytes_moved", "B"),
)


def records_document() -> str:
    """The whole document, as Markdown."""
    return "\n".join(_document()) + "\n"


def _document() -> Iterator[str]:
    yield _INTRODUCTION
    yield from _struct(Record, "Fields of every record (`Record`)", skip=frozenset())
    for event in Event.__args__:
        yield from _struct(event, event.__name__, skip=frozenset(Record.__struct_fields__))
    yield from _struct(Suspect, "Suspect", skip=frozenset())
    yield _MESSAGES
    yield from _struct(messages.Address, "Address", skip=frozenset())
    for message in messages.Message.__args__:
        yield from _struct(message, message.__name__, skip=frozenset())
    yield _RING
    for layout in LAYOUTS:
        yield f"### {layout.title}\n\nIn {layout.place}.\n\n| offset | type | field |\n|---|---|---|"
        yield from (f"| {offset} | {kind} | `{name}` |" for offset, kind, name in layout.fields())
        yield ""
    yield "`status`: " + ", ".join(f"{status.value} {status.name.lower()}" for status in SlotStatus) + ".\n"
    yield "SpanKind: " + ", ".join(f"{kind.value} {kind.name.lower()}" for kind in SpanKind) + ".\n"
    for shape in (RingHeader, GroupState, OpSlot, PeerSlot, SpanSlot, Ring, Activity):
        yield from _struct(shape, f"{shape.__name__} (decoded)", skip=frozenset())


def _struct(struct: type[msgspec.Struct], title: str, *, skip: frozenset[str]) -> Iterator[str]:
    """A heading, the docstring, and a table of the fields that are not in `skip`."""
    yield f"### {title}\n\n{inspect.cleandoc(struct.__doc__ or '')}\n"
    info = shapes.type_info(struct)
    assert isinstance(info, shapes.StructType)
    fields = [field for field in info.fields if field.name not in skip]
    if not fields:
        return
    rows = [("field", "type", "default", "unit", "meaning"), *map(_row, fields)]
    shown = [column for column in range(5) if any(row[column] for row in rows[1:])]
    rows.insert(1, ("---",) * 5)
    yield from ("| " + " | ".join(row[column] for column in shown) + " |" for row in rows)
    yield ""


def _row(field: shapes.Field) -> tuple[str, str, str, str, str]:
    kind, description, unit = _meaning(field.type)
    by_name = (unit for ending, unit in _UNITS if field.name.endswith(ending))
    return f"`{field.encode_name}`", _kind(kind), _default(field), unit or next(by_name, ""), description


def _meaning(kind: shapes.Type) -> tuple[shapes.Type, str, str]:
    """(the type itself, its description, its unit)."""
    if not isinstance(kind, shapes.Metadata):
        return kind, "", ""
    description = (kind.extra_json_schema or {}).get("description", "")
    return kind.type, str(description), str((kind.extra or {}).get("unit", ""))


def _kind(kind: Any) -> str:
    """A type in words."""
    if isinstance(kind, shapes.Metadata):
        return _kind(kind.type)
    if isinstance(kind, shapes.UnionType):
        structs = [part for part in kind.types if isinstance(part, shapes.StructType)]
        return "one of the messages" if len(structs) > 3 else " or ".join(map(_kind, kind.types))
    if isinstance(kind, shapes.VarTupleType):
        return f"list of {_kind(kind.item_type)}"
    if isinstance(kind, shapes.TupleType):
        return f"[{', '.join(map(_kind, kind.item_types))}]"
    if isinstance(kind, shapes.DictType):
        return f"map of {_kind(kind.key_type)} to {_kind(kind.value_type)}"
    if isinstance(kind, shapes.LiteralType):
        return "one of " + ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, (shapes.StructType, shapes.EnumType)):
        return kind.cls.__name__
    return next(word for simple, word in _SIMPLE if isinstance(kind, simple))


def _default(field: shapes.Field) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    return f"`{msgspec.json.encode(field.default).decode()}`"


if __name__ == "__main__":
    sys.stdout.write(records_document())
