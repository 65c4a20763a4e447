"""Times as schedulers print them: local and without a zone, twice a year ambiguous, or as seconds since 1970.

sacct prints whole seconds of the local time of the machine it runs on. In the hour that a zone goes through twice
both readings are possible; the elapsed time, which is not local, decides between them.
"""

from __future__ import annotations

import datetime
import zoneinfo

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keepstep.errors import UsageError

__all__ = ["UNKNOWN", "Moments", "check_zone", "choose", "moment_of", "moments"]

UNKNOWN: int = -(2**63)
"""Stands for a time that is not known, in arrays of microseconds."""

_WORDS = ["", "Unknown", "None", "N/A", "(null)", "NONE", "INVALID", "NO VALUE"]
_EARLIEST_US, _LATEST_US = 0, 4_102_444_800_000_000  # 1970 to 2100
_ISO = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}$"
_EPOCH = r"^\d{6,11}$"


class Moments(msgspec.Struct, frozen=True):
    """A column of times in microseconds UTC: the earlier and the later reading (equal but in a repeated hour).

    `wrong` marks what is neither a time nor a word for "not known"; `gap` marks local times that do not exist.
    """

    early: np.ndarray
    late: np.ndarray
    wrong: np.ndarray
    gap: np.ndarray


def check_zone(name: str) -> str:
    """`name` if it is a zone of the IANA list such as Europe/Berlin. Raises UsageError otherwise."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(f"no time zone {name!r}", remedy="a name such as Europe/Berlin or UTC") from error
    return name


def moments(column: pa.ChunkedArray, zone: str) -> Moments:
    """The times in a column of text: ISO local time of `zone`, ISO with an offset, or seconds since 1970."""
    text = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    size = len(text)
    early = np.full(size, UNKNOWN, dtype=np.int64)
    late = early.copy()
    gap = np.zeros(size, dtype=bool)
    blank = _flags(pc.or_(pc.is_null(text), pc.is_in(text, value_set=pa.array(_WORDS, pa.string()))))
    iso = _flags(pc.match_substring_regex(text, _ISO)) & ~blank
    _fill_local(text, iso, zone=zone, out=(early, late, gap))
    for index in np.flatnonzero(~iso & ~blank):
        value = moment_of(text[index].as_py())
        if value is not None:
            early[index] = late[index] = value
    sane = (early >= _EARLIEST_US) & (early <= _LATEST_US)
    early[~sane] = late[~sane] = UNKNOWN
    return Moments(early, late, ~blank & ~sane, gap)


def moment_of(text: object) -> int | None:
    """Microseconds UTC of an ISO time with an offset or `Z`, or of seconds since 1970 (also a number); else None."""
    if isinstance(text, bool) or text is None:
        return None
    if isinstance(text, int | float):
        return int(text * 1_000_000) if 0 < text < _LATEST_US / 1e6 else None
    word = str(text).strip()
    if word.isascii() and word.isdigit() and 6 <= len(word) <= 11:
        return int(word) * 1_000_000
    try:
        time = datetime.datetime.fromisoformat(word)
        if time.tzinfo is None:
            return None
        return int((time - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(microseconds=1))
    except (ValueError, OverflowError):
        return None


def _fill_local(text: pa.Array, iso: np.ndarray, *, zone: str, out: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Writes both readings of the local times at `iso` into `out`."""
    early, late, gap = out
    places = np.flatnonzero(iso)
    if not len(places):
        return
    chosen = text if len(places) == len(text) else text.take(pa.array(places))
    chosen = pc.replace_substring(chosen, " ", "T", max_replacements=1)
    local = pc.strptime(chosen, format="%Y-%m-%dT%H:%M:%S", unit="us", error_is_null=True)
    if zone == "UTC":
        value = _micros(local)
        early[places] = late[places] = value
        return
    first = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    second = pc.assume_timezone(local, zone, ambiguous="latest", nonexistent="latest")
    early[places], late[places] = _micros(first), _micros(second)
    back = _micros(pc.local_timestamp(first))
    gap[places] = (early[places] != UNKNOWN) & (back != _micros(local))


def _micros(times: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(times.cast(pa.int64()), UNKNOWN))


def _flags(mask: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(mask, False))


def choose(start: Moments, end: Moments, *, length_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One reading each of start and end: the pair whose distance is nearest to `length_us` (UNKNOWN: not known).

    Where the length is not known, or says nothing, it is the earlier start with the nearest end that is not before it.
    """
    best_start, best_end = start.early.copy(), end.early.copy()
    open_ = (start.early != start.late) | (end.early != end.late)
    places = np.flatnonzero(open_)
    if not len(places):
        return best_start, best_end
    best = np.full(len(places), np.iinfo(np.int64).max)
    for begin in (start.early[places], start.late[places]):
        for finish in (end.early[places], end.late[places]):
            known = (begin != UNKNOWN) & (finish != UNKNOWN)
            span = np.where(known, finish - np.where(known, begin, 0), 0)
            length = length_us[places]
            off = np.where(length != UNKNOWN, np.abs(span - length), np.where(span < 0, 1 << 60, span))
            better = known & (off < best)
            best[better] = off[better]
            best_start[places[better]], best_end[places[better]] = begin[better], finish[better]
    return best_start, best_end
