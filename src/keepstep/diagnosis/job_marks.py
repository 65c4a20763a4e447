"""What a file tells of the job that it is of: who reports, in which world, whose times, which processes speak when.

Group names and rank numbers repeat from job to job. What does not: the members of the world, the names of NCCL
communicators, the times at which a process made its calls, and process numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from keepstep.diagnosis.group_progress import WORLD
from keepstep.diagnosis.same_process import Remembered, are_of_two, share_a_call
from keepstep.records.evidence import CollectiveRecord, Evidence, GroupProgress, LogEvent, StackSample
from keepstep.records.timing_table import TimingTable

__all__ = [
    "FEWEST_SHARED",
    "Marks",
    "are_apart_in_time",
    "are_of_two_jobs",
    "marks_by_file",
    "source_of",
    "speak_apart",
]

FEWEST_SHARED = 2
"""One rank that two files share may be a file that was copied."""
_STUCK = ("watchdog_timeout", "group_status")


@dataclass(slots=True)
class Marks:
    """What one file, or several of one kind together, tell of their job."""

    reporting: set[int] = field(default_factory=set)
    """Ranks that tell how far they are, each in a report of its own."""
    groups: set[str] = field(default_factory=set)
    remembered: dict[tuple[int, str], list[Remembered]] = field(default_factory=dict)
    """By rank and group: which calls its dumps remember."""
    worlds: set[int] = field(default_factory=set)
    """Numbers for the different lists of members of the world."""
    communicators: set[str] = field(default_factory=set)
    """NCCL communicators, with the tool that names them; those that are linked through any file have one name."""
    linked: set[int] = field(default_factory=set)
    """Ranks in these communicators."""
    timed: dict[str, set[object]] = field(default_factory=dict)
    """By phase: members with times."""
    steps: dict[tuple[str, object], tuple[int, int]] = field(default_factory=dict)
    """By phase and member: the first and the last step of a table of one member."""
    one_each: bool = True
    """Whether each table is of one member."""
    formed: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """By size: NCCL communicators whose set-up a log shows, with the ranks in them that speak."""
    forming: set[tuple[str | None, int | None]] = field(default_factory=set)
    """Node and number of the processes that set them up."""
    speaking: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    """Ranks that print their steps."""
    stuck: set[int] = field(default_factory=set)
    """Ranks that say themselves that a collective of theirs did not end."""
    pids: dict[int, set[int]] = field(default_factory=dict)
    """By rank: processes that speak as it in logs."""
    stack_pids: dict[int, set[int]] = field(default_factory=dict)
    """By rank: processes whose stacks were taken; a tool outside of a container has other numbers than its logs."""
    first: float | None = None
    last: float | None = None
    twice: int = 0
    """How many ranks print their steps in more than one of the files, by no process that is known to be one."""
    stuck_twice: int = 0
    """How many say in more than one of the files that a collective did not end, in the same way."""
    path: str = ""
    """One of the files."""

    @property
    def tell_something(self) -> bool:
        """Whether any of it could part files."""
        return bool(self.reporting or self.timed or self.speaking or self.linked or self.stack_pids)

    def add(self, other: Marks) -> None:
        """Take over what another file of the same kind tells."""
        self.path = self.path or other.path
        for name in ("reporting", "groups", "worlds", "communicators", "linked", "speaking", "training", "stuck"):
            getattr(self, name).update(getattr(other, name))
        for name in ("pids", "stack_pids", "timed"):
            for key, values in getattr(other, name).items():
                getattr(self, name).setdefault(key, set()).update(values)
        for call, some in other.remembered.items():
            self.remembered.setdefault(call, []).extend(some)
        self.one_each = self.one_each and other.one_each
        self.first = min((one for one in (self.first, other.first) if one is not None), default=None)
        self.last = max((one for one in (self.last, other.last) if one is not None), default=None)


def marks_by_file(
    others: Iterable[Evidence], events: Iterable[LogEvent], *, stacks: Iterable[StackSample]
) -> dict[str, Marks]:
    """What each file tells, by its path."""
    found: dict[str, Marks] = defaultdict(Marks)
    worlds: dict[tuple[int, ...], int] = {}
    for item in others:
        if isinstance(item, GroupProgress) and item.path and not item.moment:
            _take_progress(found[item.path], item, worlds=worlds)
        elif isinstance(item, TimingTable) and item.path:
            _take_times(found[item.path], item)
        elif isinstance(item, CollectiveRecord) and item.path and item.duration_s is not None:
            found[item.path].communicators.add(f"inspector:{item.group}")
            found[item.path].linked.add(item.rank)
    for event in events:
        if event.path and event.rank is not None and event.fields.get("claimed") != "yes":
            _take_line(found[event.path], event, rank=event.rank)
    for stack in stacks:
        if stack.path and stack.rank is not None and stack.pid is not None:
            found[stack.path].stack_pids.setdefault(stack.rank, set()).add(stack.pid)
    for marks in found.values():
        _take_formed(marks)
    _name_linked(found)
    for path, marks in found.items():
        marks.path = path
    return dict(found)


def _take_progress(marks: Marks, item: GroupProgress, *, worlds: dict[tuple[int, ...], int]) -> None:
    if len(item.positions) != 1:
        marks.communicators.add(f"ras:{item.group}")
        marks.linked.update(position.rank for position in item.positions)
        return
    (position,) = item.positions
    marks.reporting.add(position.rank)
    marks.groups.add(item.group)
    if position.remembered:
        marks.remembered.setdefault((position.rank, item.group), []).append(position.remembered)
    if item.description == WORLD and item.ranks and item.members_known:
        marks.worlds.add(worlds.setdefault(item.ranks, len(worlds)))


def _take_times(marks: Marks, table: TimingTable) -> None:
    members = {table.names[who] if table.names else who for who in np.unique(table.who).tolist()}
    marks.timed.setdefault(table.phase, set()).update(members)
    marks.one_each = marks.one_each and len(members) == 1
    if len(members) == 1:
        marks.steps[(table.phase, next(iter(members)))] = (int(table.step.min()), int(table.step.max()))


def _take_line(marks: Marks, event: LogEvent, *, rank: int) -> None:
    if event.kind == "nccl_init":  # the rank is one of the communicator
        if "id" in event.fields:
            same_size = marks.formed.setdefault(int(event.fields["nranks"]), {})
            same_size.setdefault(event.fields["id"], set()).add(rank)
            marks.forming.add((event.node, event.pid))
        return
    marks.speaking.add(rank)
    if event.kind == "step_progress":
        marks.training.add(rank)
    if event.kind in _STUCK:
        marks.stuck.add(rank)
    if event.pid is not None:
        marks.pids.setdefault(rank, set()).add(event.pid)
    if event.wall is not None:
        marks.first = event.wall if marks.first is None else min(marks.first, event.wall)
        marks.last = event.wall if marks.last is None else max(marks.last, event.wall)


def _take_formed(marks: Marks) -> None:
    """Take communicators of a log for marks of its job, if the largest may be that of all ranks."""
    largest = max(marks.formed, default=0)
    if not largest or largest < len(marks.forming):
        return
    for same_size in marks.formed.values():
        marks.communicators.update(f"log:{name}" for name in same_size)
    marks.linked.update(*marks.formed[largest].values())


def _name_linked(found: Mapping[str, Marks]) -> None:
    """Give communicators that occur together in a file, directly or through others, one name: they are of one job."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = above[above[name]]
            name = above[name]
        return name

    for marks in found.values():
        names = sorted(marks.communicators)
        for name in names[1:]:
            above[top(name)] = top(names[0])
    for marks in found.values():
        marks.communicators = {top(name) for name in marks.communicators}


def are_of_two_jobs(one: Marks, other: Marks, *, same_kind: bool) -> bool:
    """Whether two kinds of files cannot be of one job. `same_kind`: their names differ in numbers or folders only."""
    return (
        (bool(one.worlds and other.worlds) and one.worlds.isdisjoint(other.worlds))
        or _report_both(one, other, same_kind=same_kind)
        or _timed_both(one, other, same_kind=same_kind)
        or _of_two_networks(one, other)
        or _processes_differ(one.pids, other.pids)
        or _processes_differ(one.stack_pids, other.stack_pids)
    )


def source_of(communicator: str) -> str:
    """Which tool named a communicator: each has other names."""
    return communicator.partition(":")[0]


def _of_two_networks(one: Marks, other: Marks) -> bool:
    """Whether the same ranks are in communicators that nothing links."""
    if len(one.linked & other.linked) < FEWEST_SHARED or not one.communicators.isdisjoint(other.communicators):
        return False
    return not set(map(source_of, one.communicators)).isdisjoint(map(source_of, other.communicators))


def _report_both(one: Marks, other: Marks, *, same_kind: bool) -> bool:
    """Whether the same ranks tell how far they are in the same group, and it is no copy."""
    shared = one.reporting & other.reporting
    if not shared or one.groups.isdisjoint(other.groups):
        return False
    if len(shared) >= FEWEST_SHARED:
        return True
    both = [
        (mine, theirs)
        for call in one.remembered.keys() & other.remembered.keys()
        for mine in one.remembered[call]
        for theirs in other.remembered[call]
    ]
    if any(are_of_two(mine, theirs) for mine, theirs in both):
        return True
    alone = same_kind and one.reporting == other.reporting
    return alone and not any(share_a_call(mine, theirs) for mine, theirs in both)


def _timed_both(one: Marks, other: Marks, *, same_kind: bool) -> bool:
    """Whether the same members have times of the same phase. Tables that stand for themselves may tell of one job."""
    if not (same_kind or (one.one_each and other.one_each)):
        return False
    return any(
        len(one.timed[phase] & other.timed[phase]) >= FEWEST_SHARED for phase in one.timed.keys() & other.timed.keys()
    )


def _processes_differ(one: Mapping[int, set[int]], other: Mapping[int, set[int]]) -> bool:
    """Whether the same ranks are other processes: two ranks at least, and none is the same."""
    shared = one.keys() & other.keys()
    return len(shared) >= FEWEST_SHARED and all(one[rank].isdisjoint(other[rank]) for rank in shared)


def speak_apart(one: Marks, other: Marks, *, same_kind: bool) -> bool:
    """Whether logs may be of two jobs, and nothing tells: the same ranks speak in both, by no process that is known."""
    if any(not one.pids[rank].isdisjoint(other.pids[rank]) for rank in one.pids.keys() & other.pids.keys()):
        return False
    if same_kind:
        return len(one.speaking & other.speaking) >= FEWEST_SHARED
    return not one.training.isdisjoint(other.training)


def are_apart_in_time(one: Marks, other: Marks) -> bool:
    """Whether all dates of one are before those of the other."""
    if one.first is None or one.last is None or other.first is None or other.last is None:
        return False
    return one.last < other.first or other.last < one.first
