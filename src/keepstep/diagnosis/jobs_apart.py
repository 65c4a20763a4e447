"""Evidence of several jobs in one directory, parted by what cannot come from one job.

What tells is in `job_marks`. Two families of files (`file_families`) in which the same ranks report the same thing are
of two jobs (or of two starts of one), and so are runs, and logs under two job numbers of Slurm. Everything else goes
with the job in whose folder it lies, or with all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, takewhile

from keepstep.diagnosis.file_families import Family, Kept, family_of, kind_of, parted_families
from keepstep.diagnosis.job_marks import (
    FEWEST_SHARED,
    Marks,
    are_apart_in_time,
    are_of_two_jobs,
    marks_by_file,
    speak_apart,
)
from keepstep.records.evidence import Evidence, LogEvent, StackSample

__all__ = ["JobEvidence", "jobs_apart"]

_MOST_FAMILIES = 500
_SLURM_FILE = re.compile(r"slurm[-_](\d{2,10}(?:_\d+)?)(?!\d)")
_SLURM_LINE = re.compile(
    r"\bSLURM_JOB(?:_?ID)?[=:]\s*(\d{2,10})\b|\b(?:Step|Job)Id=(\d{2,10})\b|\*\*\* (?:STEP|JOB) (\d{2,10})\b"
)

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
    files = marks_by_file(whole.others, whole.events, stacks=whole.stacks)
    families, kept = parted_families({path: marks for path, marks in files.items() if not _run_of(whole.runs, path)})
    conflicts, doubts = _conflicts(families)
    doubts += [
        f"these may be the logs of two jobs: {marks.twice} ranks print steps in several files named {kind_of(family)}"
        for family, marks in families.items()
        if marks.twice
    ]
    doubts += [
        f"these may be the logs of two jobs: {marks.stuck_twice} ranks tell of a collective without end in several "
        f"files named {kind_of(family)}"
        for family, marks in families.items()
        if marks.stuck_twice >= FEWEST_SHARED and not marks.twice
    ]
    divisions, anchors = _divisions(conflicts, kept, example={family: marks.path for family, marks in families.items()})
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


def _conflicts(families: dict[Family, Marks]) -> tuple[list[tuple[Family, Family]], list[str]]:
    """Pairs of families that cannot be of one job, and doubts about others in words."""
    several = [(family, marks) for family, marks in families.items() if marks.tell_something][:_MOST_FAMILIES]
    found: list[tuple[Family, Family]] = []
    doubts: list[str] = []
    for (first, one), (second, other) in combinations(several, 2):
        same_kind = kind_of(first) == kind_of(second)
        if are_of_two_jobs(one, other, same_kind=same_kind):
            found.append((first, second))
        elif speak_apart(one, other, same_kind=same_kind):
            if same_kind and are_apart_in_time(one, other):
                found.append((first, second))
            else:
                doubts.append(_doubt(len(one.speaking & other.speaking), *_told_apart(first, second)))
    return found, doubts[:4]


def _told_apart(first: Family, second: Family) -> tuple[str, str]:
    """What tells two families apart: their folders, or all of their names."""
    return (first[0], second[0]) if first[0] != second[0] else ("/".join(first), "/".join(second))


def _doubt(ranks: int, *places: str) -> str:
    return f"these may be the logs of two jobs: {ranks} ranks speak both in {' and in '.join(places)}"


# ---------------------------------------------------------------- divisions


def _divisions(
    conflicts: Iterable[tuple[Family, Family]], kept: Kept, *, example: dict[Family, str]
) -> tuple[list[_Division], list[str]]:
    """What parts the families of each pair: the folders below the last one they share, or their names."""
    by_folder: dict[_Parts, set[str]] = {}
    by_name: dict[str, set[str]] = {}
    anchors: dict[str, None] = {}
    for pair in conflicts:
        first, second = (example[family] for family in pair)
        anchors |= {first: None, second: None}
        if pair[0][0] == pair[1][0]:
            by_name.setdefault(pair[0][0], set()).update(name for _, name in pair)
            continue
        above = _shared_start(first, second)
        by_folder.setdefault(above, set()).update(_below(above, path) or "" for path in (first, second))
    divisions = [_Division(partial(_below, above), frozenset(names)) for above, names in by_folder.items()]
    divisions += [
        _Division(partial(_name_in, kept=kept, folder=folder), frozenset(names)) for folder, names in by_name.items()
    ]
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


def _name_in(path: str, *, kept: Kept, folder: str) -> str | None:
    family = family_of(path, kept)
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
