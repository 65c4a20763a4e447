"""Whether ranks under trial would wait for each other for ever: their calls and waits played together.

A call never blocks here; a wait does, until all members of the group under trial have made the call, or the sender has
sent. Members without a trial are taken to come in time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.trial_calls import call_words
from keepstep.diagnosis.trial_groups import GroupKey
from keepstep.diagnosis.trial_pairs import ANY
from keepstep.records.operations import COLLECTIVES
from keepstep.records.trial import CallKept, Trace, TrialFinding, WaitKept, place_of

__all__ = ["order_findings"]

_SEND, _RECV = 10, 11
_SHOWN = 4


def order_findings(traces: Sequence[Trace], groups: Mapping[int, Mapping[int, GroupKey]]) -> list[TrialFinding]:
    """One finding if whole traces come to a stop, with what each rank waits for."""
    if not all(trace.whole for trace in traces):
        return []
    play = _Play(traces, groups)
    stuck = play.run()
    if not stuck:
        return []
    by_rank = {trace.rank: trace for trace in traces}
    words = []
    for rank, call in sorted(stuck.items())[:_SHOWN]:
        place = place_of(by_rank[rank], call.site) or "an unknown line"
        words.append(f"rank {rank} waits in {call_words(call)} at {place}")
    return [
        TrialFinding(
            kind="deadlock",
            ranks=tuple(sorted(stuck)),
            sites=tuple(dict.fromkeys(place_of(by_rank[r], c.site) for r, c in sorted(stuck.items())))[:_SHOWN],
            what=f"{listed(stuck)} wait for each other: " + "; ".join(words),
            remedy="let all ranks come to their groups in one order, or start calls with async_op=True and wait later",
        )
    ]


class _Play:
    """The state of the play: how far each rank is, and what was called."""

    def __init__(self, traces: Sequence[Trace], groups: Mapping[int, Mapping[int, GroupKey]]) -> None:
        self._events = {trace.rank: trace.events for trace in traces}
        self._at = dict.fromkeys(self._events, 0)
        self._groups = groups
        self._members: dict[GroupKey, set[int]] = defaultdict(set)
        for trace in traces:
            for number, group in enumerate(trace.groups):
                if group.member and number in groups[trace.rank]:
                    self._members[groups[trace.rank][number]].add(trace.rank)
        self._made: Counter[tuple[GroupKey, int]] = Counter()
        self._sent: Counter[tuple[int, int, int]] = Counter()
        self._heard: Counter[tuple[int, int, int]] = Counter()
        self._needs: dict[int, dict[int, tuple[CallKept, int]]] = {rank: {} for rank in self._events}

    def run(self) -> dict[int, CallKept]:
        """The calls in which ranks are stuck for ever; empty if all come to their end."""
        moved = True
        while moved:
            moved = False
            for rank in self._events:
                while self._step(rank):
                    moved = True
        return {rank: self._blocking(rank) for rank in self._events if self._at[rank] < len(self._events[rank])}

    def _blocking(self, rank: int) -> CallKept:
        event = self._events[rank][self._at[rank]]
        assert isinstance(event, WaitKept)
        return self._needs[rank][event.number][0]

    def _step(self, rank: int) -> bool:
        if self._at[rank] >= len(self._events[rank]):
            return False
        event = self._events[rank][self._at[rank]]
        if isinstance(event, CallKept):
            self._call(rank, event)
        elif not self._over(rank, event.number):
            return False
        self._at[rank] += 1
        return True

    def _call(self, rank: int, call: CallKept) -> None:
        if call.op == _SEND:
            self._sent[rank, call.peer, call.tag] += 1
            return
        if call.op == _RECV:
            self._heard[call.peer, rank, call.tag] += 1
            self._needs[rank][call.number] = (call, self._heard[call.peer, rank, call.tag])
        elif call.op in COLLECTIVES and call.group in self._groups[rank]:
            key = self._groups[rank][call.group]
            self._made[key, rank] += 1
            self._needs[rank][call.number] = (call, self._made[key, rank])

    def _over(self, rank: int, number: int) -> bool:
        if number not in self._needs[rank]:
            return True
        call, count = self._needs[rank][number]
        if call.op == _RECV:
            known = call.peer != ANY and call.peer in self._events
            return not known or self._sent[call.peer, rank, call.tag] >= count
        key = self._groups[rank][call.group]
        return all(self._made[key, other] >= count for other in self._members[key])
