"""The version of the journal's schema, and how records of older versions are brought up to it.

A version is `major.minor`. A reader takes every older version (through the migrations here), takes a newer minor
version of its own major (unknown fields are ignored), and refuses a newer major version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from keepstep.errors import RecordError, SchemaTooNew

__all__ = ["MIGRATIONS", "SCHEMA", "Migration", "Version", "current_schema", "migrate", "parse_version"]

SCHEMA = "1.0"

Version = tuple[int, int]
Migration = Callable[[dict[str, Any]], dict[str, Any]]

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\Z", re.ASCII)


def current_schema() -> str:
    """The version this code writes."""
    return SCHEMA


def parse_version(text: str) -> Version:
    """(major, minor) of `text`. Raises RecordError for nonsense and SchemaTooNew for a newer major version."""
    match = _VERSION.match(text)
    if match is None:
        raise RecordError(f"{text[:20]!r} is not a schema version such as {SCHEMA}")
    version = (int(match[1]), int(match[2]))
    if version[0] > _CURRENT[0]:
        raise SchemaTooNew(
            f"record of schema {text}, this keepstep reads schemas up to {_CURRENT[0]}.x",
            remedy="read it with the keepstep version that wrote it, or a newer one",
        )
    return version


def migrate(fields: dict[str, Any], version: Version) -> dict[str, Any]:
    """The fields of a record of an older `version`, brought to the current schema step by step.

    Raises RecordError if no migration starts at `version`.
    """
    while version < _CURRENT:
        if version not in MIGRATIONS:
            raise RecordError(
                f"no migration from schema {version[0]}.{version[1]}",
                remedy=f"known older schemas: {', '.join(f'{a}.{b}' for a, b in sorted(MIGRATIONS))}",
            )
        version, step = MIGRATIONS[version]
        fields = step(fields) | {"schema": f"{version[0]}.{version[1]}"}
    return fields


def _from_0_9(fields: dict[str, Any]) -> dict[str, Any]:
    """0.9 (draft): `time` was the wall clock, incident phases were in ms, a finding had one set of suspect ranks."""
    new = dict(fields)
    if "time" in new:
        new["wall"] = new.pop("time")
    if new.get("record") == "Incident":
        for name in [name for name in new if name.endswith("_ms")]:
            milliseconds = new.pop(name)
            new[name.removesuffix("_ms")] = None if milliseconds is None else milliseconds / 1000
    if new.get("record") == "Finding" and "suspect_ranks" in new:
        new["suspects"] = [[{"rank": rank} for rank in new.pop("suspect_ranks")]]
    return new


_CURRENT: Version = (int(SCHEMA.split(".")[0]), int(SCHEMA.split(".")[1]))

MIGRATIONS: dict[Version, tuple[Version, Migration]] = {(0, 9): ((1, 0), _from_0_9)}
"""For each older version: the version its migration leads to, and the migration."""
