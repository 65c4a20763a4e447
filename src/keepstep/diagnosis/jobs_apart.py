"""Evidence of several jobs in one directory, parted by what cannot come from one job.

Files of one folder whose names differ only in numbers are a *family*, such as one dump a rank. Two families in which
the same ranks report the same thing are of two jobs (or of two starts of one), and so are runs, and logs under two job
numbers of Slurm. Everything else goes with the job in whose folder it lies, or with all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, takewhile

import numpy as np

from keepstep.records.evidence import Evidence, GroupProgress, LogEvent, StackSample
from keepstep.records.timing_table import TimingTable

__all__ = ["JobEvidence", "jobs_apart"]

_MOST_FAMILIES = 500
_FEWEST_SHARED = 2
"""One rank that two families share may be a file that was copied."""
_SLURM_FILE = re.compile(r"slurm[-_](\d{2,10}(?:_\d+)?)(?!\d)")
_SLURM_LINE = re.compile(
    r"\bSLURM_JOB(?:_?ID)?[=:]\s*(\d{2,10})\b|\b(?:Step|Job)Id=(\d{2,10})\b|\*\*\* (?:STEP|JOB) (\d{2,10})\b"
)

_Family = tuple[str, str]
"""Folder, and name with `#` for numbers."""
_Key = tuple[str | None, ...]
_Parts = tuple[str, ...]


@dataclass(slots=True)
class JobEvidence:
    """What belongs to one job. `name` is empty if there is only one; `runs` are its run directories.

    `doubts` say in words why it may be two jobs all the same.
    """

    name: str = ""
    others: list[Evidence] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    stacks: list[StackSample] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    doubts: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    """What the files of one family tell: who reports of which groups, whose times of which phases, who speaks when."""

    reporting: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    timed: dict[str, set[object]] = field(default_factory=dict)
    one_each: bool = True
    """Whether each table is of one member."""
    speaking: set[int] = field(default_factory=set)
    first: float | None = None
    last: float | None = None


@dataclass(slots=True, frozen=True)
class _Division:
    """One way to part files: `part` says to which part a file belongs (None: to none); only those in `names` count."""

    part: Callable[[str], str | None]
    names: frozenset[str]

    def of(self, path: str) -> str | None:
        """The part of a file, None if it belongs to no job more than to another."""
        found = self.part(path)
        return found if found in self.names else None


def jobs_apart(whole: JobEvidence) -> list[JobEvidence]:
    """The evidence by job; `whole` itself, with doubts, if all of it may be of one job."""
    conflicts, doubts = _conflicts(_families(whole.others, whole.events))
    divisions, anchors = _divisions(conflicts)
    slurm = _slurm_ids(whole.events)
    if len(set(slurm.values())) > 1:
        divisions.append(_Division(slurm.get, frozenset(slurm.values())))
        anchors += slurm
    if len(whole.runs) > 1:
        divisions.append(_Division(partial(_run_of, whole.runs), frozenset(whole.runs)))
        anchors += [f"{run}/" for run in whole.runs]
    keys = _most_exact({tuple(division.of(path) for division in divisions) for path in anchors})
    if len(keys) < 2:
        return [replace(whole, doubts=tuple(doubts))]
    return _shared_out(whole, _Sorter(divisions, keys))


class _Sorter:
    """Which jobs a file belongs to."""

    def __init__(self, divisions: list[_Division], keys: list[_Key]) -> None:
        self._divisions = divisions
        self.keys = keys
        self._known: dict[str, list[int]] = {}

    def jobs_of(self, path: str) -> list[int]:
        """Numbers of the jobs: one, or several (all, for what has no file) if nothing parts it."""
        if path not in self._known:
            mine = tuple(division.of(path) if path else None for division in self._divisions)
            fitting = [number for number, key in enumerate(self.keys) if _agree(mine, key)]
            surely = [number for number in fitting if _share_a_part(mine, self.keys[number])]
            self._known[path] = surely or fitting or list(range(len(self.keys)))
        return self._known[path]


def _shared_out(whole: JobEvidence, sorter: _Sorter) -> list[JobEvidence]:
    jobs = [JobEvidence(_name(key)) for key in sorter.keys]
    for item in whole.others:
        for number in sorter.jobs_of(getattr(item, "path", "")):
            jobs[number].others.append(item)
    for event in whole.events:
        for number in sorter.jobs_of(event.path):
            jobs[number].events.append(event)
    for stack in whole.stacks:
        for number in sorter.jobs_of(stack.path):
            jobs[number].stacks.append(stack)
    for run in whole.runs:
        for number in sorter.jobs_of(f"{run}/"):
            jobs[number].runs.append(run)
    return jobs


def _name(key: _Key) -> str:
    return ", ".join(dict.fromkeys(part.rpartition("/")[2] or part or "." for part in key if part is not None))


def _agree(one: _Key, other: _Key) -> bool:
    return all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def _share_a_part(one: _Key, other: _Key) -> bool:
    return any(a is not None and a == b for a, b in zip(one, other, strict=True))


def _most_exact(keys: set[_Key]) -> list[_Key]:
    """The keys without those that only say less than another one."""
    return sorted(
        (
            key
            for key in keys
            if not any(
                other != key and all(a is None or a == b for a, b in zip(key, other, strict=True)) for other in keys
            )
        ),
        key=str,
    )


# ---------------------------------------------------------------- families


def _family_of(path: str) -> _Family:
    folder, _, name = path.rpartition("/")
    return folder, re.sub(r"\d+", "#", name.split(".")[0] or name)


def _families(others: Iterable[Evidence], events: Iterable[LogEvent]) -> dict[_Family, _Seen]:
    found: dict[_Family, _Seen] = {}
    known: dict[str, _Seen] = {}

    def seen_of(path: str) -> _Seen:
        if path not in known:
            known[path] = found.setdefault(_family_of(path), _Seen())
        return known[path]

    for item in others:
        if isinstance(item, GroupProgress) and item.path and len(item.positions) == 1 and not item.moment:
            seen = seen_of(item.path)
            seen.reporting.add(item.positions[0].rank)
            seen.groups.add(item.group)
        elif isinstance(item, TimingTable) and item.path:
            members = {item.names[who] if item.names else who for who in np.unique(item.who).tolist()}
            seen = seen_of(item.path)
            seen.timed.setdefault(item.phase, set()).update(members)
            seen.one_each = seen.one_each and len(members) == 1
    for event in events:
        if event.path and event.rank is not None and event.fields.get("claimed") != "yes":
            seen = seen_of(event.path)
            seen.speaking.add(event.rank)
            if event.wall is not None:
                seen.first = event.wall if seen.first is None else min(seen.first, event.wall)
                seen.last = event.wall if seen.last is None else max(seen.last, event.wall)
    return found


def _conflicts(families: dict[_Family, _Seen]) -> tuple[list[tuple[_Family, _Family]], list[str]]:
    """Pairs of families that cannot be of one job, and doubts about others in words."""
    several = [
        (family, seen)
        for family, seen in families.items()
        if max(len(seen.reporting), len(seen.speaking), *map(len, seen.timed.values()), 0) >= _FEWEST_SHARED
    ][:_MOST_FAMILIES]
    found: list[tuple[_Family, _Family]] = []
    doubts: list[str] = []
    for (first, one), (second, other) in combinations(several, 2):
        same_kind = first[1] == second[1]
        if _report_both(one, other) or _timed_both(one, other, same_kind=same_kind):
            found.append((first, second))
        elif same_kind and len(both := one.speaking & other.speaking) >= _FEWEST_SHARED:
            if _apart_in_time(one, other):
                found.append((first, second))
            else:
                doubts.append(
                    f"these may be the logs of two jobs: {len(both)} ranks speak both in {first[0]} and in {second[0]}"
                )
    return found, doubts[:4]


def _report_both(one: _Seen, other: _Seen) -> bool:
    """Whether the same ranks tell how far they are in the same group."""
    return not one.groups.isdisjoint(other.groups) and len(one.reporting & other.reporting) >= _FEWEST_SHARED


def _timed_both(one: _Seen, other: _Seen, *, same_kind: bool) -> bool:
    """Whether the same members have times of the same phase. Tables that stand for themselves may tell of one job."""
    if not (same_kind or (one.one_each and other.one_each)):
        return False
    return any(
        len(one.timed[phase] & other.timed[phase]) >= _FEWEST_SHARED for phase in one.timed.keys() & other.timed.keys()
    )


def _apart_in_time(one: _Seen, other: _Seen) -> bool:
    if one.first is None or one.last is None or other.first is None or other.last is None:
        return False
    return one.last < other.first or other.last < one.first


# ---------------------------------------------------------------- divisions


def _divisions(conflicts: Iterable[tuple[_Family, _Family]]) -> tuple[list[_Division], list[str]]:
    """What parts the families of each pair: the folders below the last one they share, or their names."""
    by_folder: dict[_Parts, set[str]] = {}
    by_name: dict[str, set[str]] = {}
    anchors: dict[str, None] = {}
    for pair in conflicts:
        first, second = (f"{folder}/{name}" if folder else name for folder, name in pair)
        anchors |= {first: None, second: None}
        if pair[0][0] == pair[1][0]:
            by_name.setdefault(pair[0][0], set()).update(name for _, name in pair)
            continue
        above = _shared_start(first, second)
        by_folder.setdefault(above, set()).update(_below(above, path) or "" for path in (first, second))
    divisions = [_Division(partial(_below, above), frozenset(names)) for above, names in by_folder.items()]
    divisions += [_Division(partial(_name_in, folder), frozenset(names)) for folder, names in by_name.items()]
    return divisions, list(anchors)


def _shared_start(first: str, second: str) -> _Parts:
    """The folders that two paths have in common."""
    pairs = zip(first.split("/")[:-1], second.split("/")[:-1], strict=False)
    return tuple(one for one, _ in takewhile(lambda both: both[0] == both[1], pairs))


def _below(above: _Parts, path: str) -> str | None:
    """The folder directly in `above` under which a file is, `above` itself if it lies there, None if elsewhere."""
    parts = tuple(path.split("/"))
    if parts[: len(above)] != above:
        return None
    return "/".join(parts[: len(above) + 1] if len(parts) > len(above) + 1 else above)


def _name_in(folder: str, path: str) -> str | None:
    family = _family_of(path)
    return family[1] if family[0] == folder else None


def _run_of(runs: Sequence[str], path: str) -> str | None:
    """The innermost run directory around a file."""
    around = [run for run in runs if path.startswith(f"{run}/")]
    return max(around, key=len, default=None)


def _slurm_ids(events: Iterable[LogEvent]) -> dict[str, str]:
    """By file: the job number of Slurm that its name or its lines give, if they give one."""
    named: dict[str, set[str]] = {}
    for event in events:
        if event.path and event.path not in named:
            match = _SLURM_FILE.search(event.path.rpartition("/")[2])
            named[event.path] = {match[1]} if match else set()
    said: dict[str, set[str]] = {}
    for event in events:
        if event.path and not named[event.path] and event.fields.get("claimed") != "yes":
            said.setdefault(event.path, set()).update(_numbers(event.text))
    return {
        path: f"Slurm job {next(iter(numbers))}"
        for path, numbers in (*((path, ids) for path, ids in named.items() if ids), *said.items())
        if len(numbers) == 1
    }


def _numbers(text: str) -> Iterator[str]:
    for match in _SLURM_LINE.finditer(text):
        yield next(number for number in match.groups() if number)
