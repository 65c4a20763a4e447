"""Files of one folder whose names differ only in numbers are a family, such as one dump a rank.

Where files of a family cannot be of one job (the same ranks report in several of them), one of the numbers in their
names may be the job's: `job1_rank0`, `job2_rank0`. Then the family is several, each with that number in its name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, count

from keepstep.diagnosis.job_marks import FEWEST_SHARED, Marks, source_of
from keepstep.diagnosis.same_process import are_of_two

__all__ = ["Family", "Kept", "family_of", "kind_of", "parted_families"]

Family = tuple[str, str]
"""Folder, and name with `#` for numbers."""
Kept = Mapping[Family, frozenset[int]]
"""By family as its names alone say: which numbers of a name, counted from 0, part its files."""


def family_of(path: str, kept: Kept) -> Family:
    """The family of a file, the numbers that part it kept in the name."""
    folder, stem = _folder_and_stem(path)
    family = folder, re.sub(r"\d+", "#", stem)
    places = kept.get(family)
    if not places:
        return family
    number = count()
    return folder, re.sub(r"\d+", lambda found: found[0] if next(number) in places else "#", stem)


def parted_families(files: Mapping[str, Marks]) -> tuple[dict[Family, Marks], dict[Family, frozenset[int]]]:
    """What the files of each family tell together, and which numbers part a family that cannot be of one job."""
    by_family: dict[Family, dict[str, Marks]] = defaultdict(dict)
    for path, marks in files.items():
        by_family[family_of(path, {})][path] = marks
    kept = {
        family: places
        for family, some in by_family.items()
        if len(some) > 1 and (clashing := _clashing(list(some.values()))) > 1 and (places := _places(some, clashing))
    }
    together: dict[Family, Marks] = defaultdict(Marks)
    for path, marks in files.items():
        joint = together[family_of(path, kept)]
        if not _share_a_process(joint, marks):
            joint.twice += len(joint.training & marks.training)
            joint.stuck_twice += len(joint.stuck & marks.stuck)
        joint.add(marks)
    return dict(together), kept


def kind_of(family: Family) -> str:
    """The name of a family without any number: what its files are."""
    return re.sub(r"\d+", "#", family[1])


def _share_a_process(known: Marks, other: Marks) -> bool:
    """Whether a process is known to speak in both."""
    return any(not known.pids[rank].isdisjoint(other.pids[rank]) for rank in known.pids.keys() & other.pids.keys())


def _folder_and_stem(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name.split(".")[0] or name


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", _folder_and_stem(path)[1]))


def _places(files: Mapping[str, Marks], most: int) -> frozenset[int]:
    """The place of the number, or else of all numbers, that parts files into at most `most` jobs; empty if none."""
    numbers = {path: _numbers(path) for path in files}
    places = [
        place
        for place in range(min(map(len, numbers.values())))
        if len({found[place] for found in numbers.values()}) > 1
        and not all(_is_rank(found[place], files[path]) for path, found in numbers.items())
    ]
    for chosen in [*([place] for place in places), *([places] if len(places) > 1 else [])]:
        parts: dict[tuple[str, ...], list[Marks]] = defaultdict(list)
        for path, found in numbers.items():
            parts[tuple(found[place] for place in chosen)].append(files[path])
        if len(parts) <= most and all(len(part) < 2 or _clashing(part) < 2 for part in parts.values()):
            return frozenset(chosen)
    return frozenset()


def _is_rank(number: str, marks: Marks) -> bool:
    return len(number) < 10 and {int(number)} in (marks.reporting, marks.speaking, marks.linked)


def _clashing(files: Sequence[Marks]) -> int:
    """How many jobs the files are of at least; 1 if they may be of one."""
    return max(
        1,
        len({world for marks in files for world in marks.worlds}),
        _reports(files),
        _tables(files),
        _strangers(files),
        _processes([marks.pids for marks in files]),
        _processes([marks.stack_pids for marks in files]),
    )


def _reports(files: Sequence[Marks]) -> int:
    """How many files the same ranks report in, each of the same groups."""
    by_rank: dict[int, list[Marks]] = defaultdict(list)
    for marks in files:
        for rank in marks.reporting:
            by_rank[rank].append(marks)
    doubled = [some for some in by_rank.values() if len(some) > 1]
    doubled = [some for some in doubled if any(_same_groups(*pair) for pair in combinations(some[:8], 2))]
    alone = len(by_rank) == 1
    if len(doubled) >= FEWEST_SHARED or (doubled and (alone or _of_two_processes(doubled[0]))):
        return max(map(len, doubled))
    return 1


def _same_groups(one: Marks, other: Marks) -> bool:
    return not one.groups.isdisjoint(other.groups)


def _of_two_processes(files: Sequence[Marks]) -> bool:
    return any(
        are_of_two(mine, theirs)
        for one, other in combinations(files[:8], 2)
        for call in one.remembered.keys() & other.remembered.keys()
        for mine in one.remembered[call]
        for theirs in other.remembered[call]
    )


def _tables(files: Sequence[Marks]) -> int:
    """How many files have times of the same steps of the same members: two members at least, each in its own files."""
    spans: dict[tuple[str, object], list[tuple[int, int]]] = defaultdict(list)
    for marks in files:
        if marks.one_each:
            for key, span in marks.steps.items():
                spans[key].append(span)
    doubled: dict[object, int] = {}
    for (_, member), some in spans.items():
        if any(one[0] <= other[1] and other[0] <= one[1] for one, other in combinations(some[:8], 2)):
            doubled[member] = max(doubled.get(member, 0), len(some))
    return max(doubled.values()) if len(doubled) >= FEWEST_SHARED else 1


def _strangers(files: Sequence[Marks]) -> int:
    """How many networks of communicators have the same ranks."""
    networks = {(rank, name) for one in files for rank in one.linked for name in one.communicators}
    counts = [often for often in Counter((rank, source_of(name)) for rank, name in networks).values() if often > 1]
    return max(counts) if len(counts) >= FEWEST_SHARED else 1


def _processes(files: Sequence[Mapping[int, set[int]]]) -> int:
    """How many processes are the same rank; 1 if any two files name the same process."""
    by_rank: dict[int, list[set[int]]] = defaultdict(list)
    for pids in files:
        for rank, some in pids.items():
            by_rank[rank].append(some)
    doubled = {rank: some for rank, some in by_rank.items() if len(some) > 1}
    if len(doubled) < FEWEST_SHARED or any(len(set.union(*some)) < sum(map(len, some)) for some in doubled.values()):
        return 1
    return max(map(len, doubled.values()))
