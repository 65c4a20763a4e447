"""The taxonomy of causes: a versioned TOML text that a site can edit, and how evidence is matched with it."""

from __future__ import annotations

import re
import tomllib
from typing import Literal, get_args

import msgspec

from keepstep.errors import UsageError

__all__ = ["OWNERS", "Cause", "Owner", "Taxonomy", "Windows", "parse_taxonomy"]

Owner = Literal["user_program", "system_software", "hardware", "network", "storage", "scheduler", "operator", "unknown"]
OWNERS: tuple[Owner, ...] = get_args(Owner)
_NOT_INFRASTRUCTURE = ("user_program", "operator", "unknown")
_MOST_CAUSES = 500


class Windows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in minutes, and how many equal failures in a row are a crash loop.

    A check belongs to an attempt that ended within `after_minutes` before it or `before_minutes` after it, both
    edges included (Meta, Revisiting Reliability, HPCA 2025: 10 and 5 minutes).
    """

    before_minutes: float = 10
    after_minutes: float = 5
    retry_minutes: float = 60
    requeue_minutes: float = 60
    preempt_minutes: float = 10
    crash_loop: int = 3


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause. `rank` is its place in the file; consequences rank behind all others."""

    name: str
    owner: Owner
    infrastructure: bool | None = None
    scope: Literal["node", "cluster"] = "node"
    event_seconds: int = 900
    consequence: bool = False
    checks: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    rank: int = 0

    @property
    def counts(self) -> bool:
        """Whether failures of this cause are the infrastructure's."""
        return self.owner not in _NOT_INFRASTRUCTURE if self.infrastructure is None else self.infrastructure


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    cause: list[Cause]
    windows: Windows = Windows()


class Taxonomy:
    """The causes in order. Methods answer None where nothing matches."""

    def __init__(self, version: str, windows: Windows, *, causes: tuple[Cause, ...]) -> None:
        self.version = version
        self.windows = windows
        self.causes = causes
        self._compiled = {
            (cause.name, field): re.compile("|".join(f"(?:{pattern})" for pattern in getattr(cause, field)), re.I)
            for cause in causes
            for field in ("checks", "reasons", "incidents")
            if getattr(cause, field)
        }

    def of_check(self, check: str, message: str, *, xid: int | None) -> Cause | None:
        """Cause of a failed health check: by its XID, else by the name of the check, else by its message."""
        if xid is not None:
            found = next((cause for cause in self.causes if xid in cause.xids), None)
            if found:
                return found
        return self._first("checks", check) or self._first("checks", message)

    def of_interval(self, *texts: str) -> Cause | None:
        """Cause of a node interval, from its reason, class and description."""
        return self._first("reasons", " / ".join(text for text in texts if text))

    def of_incident(self, kind: str, layer: str) -> Cause | None:
        """Cause of an incident of keepstep; the layer says more than the kind."""
        return (self._first("incidents", layer) if layer != "undetermined" else None) or self._first("incidents", kind)

    def of_ending(self, state: str, code: int | None, *, signal: int | None) -> Cause | None:
        """Cause by what the scheduler says alone: signal, then exit code, then state."""
        by_signal = (cause for cause in self.causes if signal and signal in cause.signals)
        by_code = (cause for cause in self.causes if code and code in cause.codes)
        by_state = (cause for cause in self.causes if state in cause.states)
        fallback = next(by_state, None)
        if fallback is not None and state != "FAILED":
            return fallback
        return next(by_signal, None) or next(by_code, None) or fallback

    def by_name(self, name: str) -> Cause:
        """The cause called `name`. Raises KeyError if there is none."""
        return {cause.name: cause for cause in self.causes}[name]

    def _first(self, field: str, text: str) -> Cause | None:
        if not text:
            return None
        for cause in self.causes:
            pattern = self._compiled.get((cause.name, field))
            if pattern is not None and pattern.search(text):
                return cause
        return None


def parse_taxonomy(text: str, *, where: str = "taxonomy.toml") -> Taxonomy:
    """The taxonomy in `text`. Raises UsageError that names the line or field that is wrong."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"not a taxonomy: {error}", where=where) from error
    names = [cause.name for cause in file.cause]
    if len(set(names)) != len(names) or len(names) > _MOST_CAUSES:
        raise UsageError(f"a cause is there twice, or there are more than {_MOST_CAUSES}", where=where)
    first = [cause for cause in file.cause if not cause.consequence]
    late = [cause for cause in file.cause if cause.consequence]
    ranked = tuple(msgspec.structs.replace(cause, rank=rank) for rank, cause in enumerate([*first, *late]))
    try:
        return Taxonomy(file.version, file.windows, causes=ranked)
    except re.error as error:
        raise UsageError(f"not a regular expression: {error.pattern!r}: {error}", where=where) from error
