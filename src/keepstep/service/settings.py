"""Settings: one TOML file, few keys, each validated once.

Precedence, the first that names a key wins: command line, the file given with `--settings`, `./keepstep.toml`, the
defaults below. No environment variable is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from keepstep.errors import UsageError

__all__ = ["DEFAULT_FILE", "Settings", "load_settings"]

DEFAULT_FILE = Path("keepstep.toml")

_MAX_FILE_BYTES = 1024 * 1024
_RANGE = re.compile(r"Expected `\w+` (>=|<=|>|<) (\S+) - at `\$\.(\w+)`")
_WORDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a run; `docs/cli.md` says what each one costs."""

    nproc_per_node: _Positive = 1
    standby: _Count = 0
    max_restarts: _Count = 3
    run_root: str = "keepstep-runs"
    patience_s: _Seconds = 60.0
    frozen_s: _Seconds = 0.3
    controller_patience_s: _Seconds = 60.0
    ring_slots: Annotated[int, msgspec.Meta(ge=1024, le=1 << 22)] = 16384
    reserve_bytes: _Count = 64 * 1024 * 1024
    keep_runs: _Count = 20
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    token_file: str = ""
    traffic: str = ""
    hang_s: _Seconds = 5.0
    on_hang: Literal["observe", "replace"] = "replace"
    keep_findings: _Positive = 50
    evidence_bytes: _Count = 256 * 1024 * 1024
    domains: tuple[str, ...] = ()
    on_shortage: Literal["wait", "stop"] = "stop"
    shortage_s: _Seconds = 300.0
    silence_s: Annotated[float, msgspec.Meta(ge=1)] = 15.0
    sandbox: bool = True


def load_settings(file: Path | None, *, overrides: dict[str, Any], default: Path = DEFAULT_FILE) -> Settings:
    """Settings from the defaults, `default` (when it exists), `file` and `overrides`, later ones winning.

    An override of None means that the command line does not name the key. Raises UsageError for a file that cannot
    be read, an unknown key or a value of the wrong type or range.
    """
    merged: dict[str, Any] = {}
    for path in (default if default.is_file() else None, file):
        if path is not None:
            merged |= _read(path)
    merged |= {key: value for key, value in overrides.items() if value is not None}
    return _checked(merged, where="the command line")


def _read(path: Path) -> dict[str, Any]:
    """The keys of one settings file, checked on their own so that an error names the file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError("settings file is too large", where=str(path), remedy="a settings file is a few lines")
        found = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read settings: {error.strerror}", where=str(path)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"settings are not TOML: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise UsageError("settings are not a table", where=str(path))
    _checked(found, where=str(path))
    return found


def _checked(found: dict[str, Any], *, where: str) -> Settings:
    try:
        return msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        if readable := _out_of_range(str(error), found):
            raise UsageError(f"bad setting: {readable}", where=where) from error
        known = ", ".join(Settings.__struct_fields__)
        raise UsageError(f"bad setting: {error}", where=where, remedy=f"known keys: {known}") from error


def _out_of_range(complaint: str, found: dict[str, Any]) -> str:
    """msgspec's complaint about a number out of range in plain words; empty if it is about something else."""
    match = _RANGE.match(complaint)
    if match is None:
        return ""
    relation, bound, key = match.groups()
    return f"{key} must be {_WORDS[relation]} {bound}, got {found[key]}"
