"""Collectives of ranks under trial: members of a group have to make the same calls in the same order.

Sizes are not compared where they come from data: objects, parts chosen by the script, and everything in a step behind
an exchange of integers that differed between the ranks (each rank's trial was answered with its own).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.trial_groups import GroupKey, ranks_words
from keepstep.records.operations import COLLECTIVES, element_name, operation_name
from keepstep.records.trial import CallKept, Trace, TrialFinding, place_of

__all__ = ["call_findings", "call_words", "calls_by_group"]

_REDUCTIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
_BYTES = (1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16)
"""Bytes of an element by its number, as in `records.operations.ELEMENTS`."""
_ALL_REDUCE, _REDUCE, _BROADCAST, _SCATTER, _BARRIER = 1, 2, 3, 8, 9

_Calls = dict[GroupKey, dict[int, list[CallKept]]]


def calls_by_group(traces: Sequence[Trace], groups: Mapping[int, Mapping[int, GroupKey]]) -> _Calls:
    """The collectives of each group that ranks agree on, by rank, in order; members that made none are there."""
    found: _Calls = defaultdict(dict)
    for trace in traces:
        for number, group in enumerate(trace.groups):
            key = groups[trace.rank].get(number)
            if key is not None and group.member:
                found[key][trace.rank] = []
        for event in trace.events:
            if isinstance(event, CallKept) and event.op in COLLECTIVES:
                key = groups[trace.rank].get(event.group)
                if key is not None:
                    found[key].setdefault(trace.rank, []).append(event)
    return found


def call_findings(traces: Sequence[Trace], groups: Mapping[int, Mapping[int, GroupKey]]) -> list[TrialFinding]:
    """One finding for each group whose members do not call alike; the first difference counts."""
    by_rank = {trace.rank: trace for trace in traces}
    exchanged = {trace.rank: _exchanges(trace) for trace in traces}
    found = []
    for key, calls in calls_by_group(traces, groups).items():
        if len(calls) > 1:
            one = _Group(key, calls, traces=by_rank, exchanged=exchanged).finding()
            found += [] if one is None else [one]
    return _without_echoes(found)


def call_words(call: CallKept) -> str:
    """`all_reduce (sum) of 1024 float32`."""
    name = operation_name(call.op)
    if call.op == _BARRIER:
        return name
    if call.reduction >= 0:
        name += f" ({_REDUCTIONS[call.reduction]})"
    size = _size(call)
    unit = _BYTES[call.element] if call.element < len(_BYTES) else 1
    root = f" from root {call.root}" if call.root >= 0 else ""
    return f"{name} of {size // unit} {element_name(call.element)}{root}"


def _size(call: CallKept) -> int:
    """Bytes that have to be equal on every member."""
    if call.op == _BARRIER:
        return 0
    if call.op == _BROADCAST:
        return max(call.sent, call.got)
    return call.got if call.op == _SCATTER else call.sent


def _kind(call: CallKept) -> tuple[int, ...]:
    """What has to be equal apart from the size."""
    return (call.op,) if call.op == _BARRIER else (call.op, call.element, call.reduction, call.root)


def _exchanges(trace: Trace) -> dict[int, list[tuple[int, str, int]]]:
    """By step: integers that this rank gave to others: (number of the call, where, checksum)."""
    found: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    times: Counter[tuple[int, str]] = Counter()
    for event in trace.events:
        if isinstance(event, CallKept) and event.value:
            where = place_of(trace, event.site)
            times[event.step, where] += 1
            found[event.step].append((event.number, f"{where} {times[event.step, where]}", event.value))
    return found


def _without_echoes(found: list[TrialFinding]) -> list[TrialFinding]:
    """One finding for one place: many groups of a kind fall apart at the same line."""
    first: dict[tuple[str, tuple[str, ...]], TrialFinding] = {}
    for one in found:
        first.setdefault((one.kind, one.sites), one)
    return list(first.values())


class _Group:
    """One group with the calls of its members under trial."""

    def __init__(
        self,
        key: GroupKey,
        calls: Mapping[int, list[CallKept]],
        *,
        traces: Mapping[int, Trace],
        exchanged: Mapping[int, Mapping[int, list[tuple[int, str, int]]]],
    ) -> None:
        self.title = f"the group of {ranks_words(key[0])}"
        self.calls, self.traces, self.exchanged = calls, traces, exchanged

    def finding(self) -> TrialFinding | None:
        """The first difference."""
        longest = max(len(calls) for calls in self.calls.values())
        for index in range(longest):
            here = {rank: calls[index] for rank, calls in self.calls.items() if index < len(calls)}
            absent = [rank for rank in self.calls if rank not in here and self.traces[rank].whole]
            if len({_kind(call) for call in here.values()}) > 1:
                return self._differ(index, here, kind="calls_differ")
            if len({_size(call) for call in here.values()}) > 1 and not self._by_data(here):
                lines = {self._place(rank, call) for rank, call in here.items()}
                return self._differ(index, here, kind="sizes_differ" if len(lines) == 1 else "calls_differ")
            if absent and here:
                return self._missing(index, here, absent=absent)
        return None

    def _by_data(self, here: Mapping[int, CallKept]) -> bool:
        """Whether the sizes of these calls may come from data."""
        if any(call.free for call in here.values()):
            return True
        given: dict[str, set[int]] = defaultdict(set)
        for rank, call in here.items():
            for number, where, value in self.exchanged[rank].get(call.step, ()):
                if number < call.number:
                    given[where].add(value)
        return any(len(values) > 1 for values in given.values())

    def _differ(self, index: int, here: Mapping[int, CallKept], *, kind: str) -> TrialFinding:
        opinions: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, call in here.items():
            opinions[(*_kind(call), _size(call))].append(rank)
        said = sorted(opinions.values(), key=len)
        clear = len(said[0]) < len(said[-1])
        odd = [rank for who in (said[:-1] if clear else said) for rank in who]
        step = next(iter(here.values())).step
        words = [f"{listed(who)}: {self._called(who[0], here[who[0]])}" for who in said[:4]]
        return TrialFinding(
            kind=kind,
            ranks=tuple(sorted(odd)),
            sites=self._sites(here, said),
            what=f"collective {index} of {self.title} ({_when(step)}) is not the same: " + "; ".join(words),
            remedy=_REMEDY[kind],
        )

    def _missing(self, index: int, here: Mapping[int, CallKept], *, absent: Sequence[int]) -> TrialFinding:
        """Some members made fewer calls; where the lines of the script part tells better which call is the odd one."""
        rank, other = next(iter(here)), absent[0]
        places = [self._place(rank, call) for call in self.calls[rank]]
        others = [self._place(other, call) for call in self.calls[other]]
        at = next((i for i, (a, b) in enumerate(zip(places, others, strict=False)) if a != b), index)
        call = self.calls[rank][at]
        more = sorted(here)
        less = sorted(absent)
        few, many = (more, less) if len(more) < len(less) else (less, more)
        return TrialFinding(
            kind="call_missing",
            ranks=tuple(few),
            sites=(places[at],),
            what=f"{listed(more)} make more calls in {self.title} than {listed(less)}: "
            f"{self._called(rank, call)} ({_when(call.step)}) is not called there",
            remedy=_REMEDY["call_missing"],
            evidence=(f"{len(self.calls[rank])} calls on rank {rank}, {len(self.calls[other])} on rank {other}",),
        )

    def _called(self, rank: int, call: CallKept) -> str:
        return f"{call_words(call)} at {self._place(rank, call)}"

    def _place(self, rank: int, call: CallKept) -> str:
        return place_of(self.traces[rank], call.site) or "an unknown line"

    def _sites(self, here: Mapping[int, CallKept], said: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._place(who[0], here[who[0]]) for who in said))


def _when(step: int) -> str:
    return "up to the first step" if step < 0 else f"step {step}"


_REMEDY = {
    "calls_differ": "every member of a group has to make the same calls in the same order; look for a branch on the "
    "rank or its role",
    "sizes_differ": "give tensors of one shape and type on every member; look for what depends on the rank or on a "
    "rest of a division",
    "call_missing": "make the call on every member of the group, or on a group of those that make it",
}
