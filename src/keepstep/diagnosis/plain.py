"""The watch of a job that records nothing: hangs and slow members by stacks and processor time alone. Pure.

Hang: for a while no rank of the job uses a processor and no stack moves. The origin is the rank that stands outside the
collectives in which all others wait. Slow: over many looks all ranks but one are mostly found waiting in collectives.
Both abstain where the looks do not single anybody out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from keepstep.records.finding import Finding, Layer, Suspect
from keepstep.records.plain_samples import PlainReport, PlainSample

__all__ = ["PlainChange", "PlainWatch"]

_KEPT = 60
_BUSY_SHARE = 0.01
_LEAST_LOOKS = 4
_STALE_S = 4.0
_SLOW_LOOKS = 15
_OTHERS_WAIT = 0.6
_SUSPECT_WAITS = 0.2
_GONE_AFTER = 5
_MOVED_SHARE = 0.1
"""A hang is over when a stack moves, or a rank uses such a share of a processor over `_GONE_AFTER` looks: a thread
beside the one that stands may wake for a moment."""
_TURNS_PER_S = 2.0
"""Who polls once a second may do so for ever; a main thread that is woken more often makes steps, if light ones."""
_HARD_AFTER = 3
"""A hang that has lasted so many times `hang_s`, or a slow rank so many spells of looks, may be acted on."""
_SLOW_KEY = "plain:slow:"
_LAYERS: dict[str, Layer] = {"data": "dataloader", "lock": "application", "storage": "storage"}


class PlainChange(msgspec.Struct, frozen=True):
    """A finding that is new, updated or ended; `hard` says that its one suspect may be restarted after a check."""

    key: str
    status: str
    finding: Finding
    hard: bool = False


class _Look(msgspec.Struct, frozen=True):
    """`wall` is by the clock of the node, which may be wrong by minutes; `heard` by that of whoever calls."""

    wall: float
    node: str
    sample: PlainSample
    heard: float


class PlainWatch:
    """What is remembered of one job of `world` ranks.

    A hang is told after `hang_s` seconds without any movement, and is hard evidence after three times as long. What an
    earlier watch of the job left `open` stands until there are looks enough to judge it anew.
    """

    def __init__(self, world: int, *, hang_s: float, open: Iterable[PlainChange] = ()) -> None:
        self._world = world
        self._hang_s = hang_s
        self._looks: dict[int, deque[_Look]] = {}
        self._members: dict[int, str] = {}
        self._network: dict[str, deque[tuple[float, int]]] = {}
        self._open = {left.key: (left.finding, left.hard) for left in open}
        self._left = set(self._open)
        self._missed: Counter[str] = Counter()
        self._slow_since: dict[str, float] = {}
        self._stood = float("-inf")
        self._standing: dict[int, PlainSample] = {}

    def observe(self, reports: Iterable[PlainReport], now: float) -> tuple[PlainChange, ...]:
        """What the `reports` change, at wall-clock time `now`."""
        fresh = renewed = False
        for report in reports:
            self._network.setdefault(report.node, deque(maxlen=_KEPT)).append((report.wall, report.network_bytes))
            for sample in report.samples:
                fresh = True
                renewed |= self._take(_Look(report.wall, report.node, sample, now))
        ended = self._end_all() if renewed else ()
        return (*ended, *self._changes(self._judge(now))) if fresh else ()

    def _take(self, look: _Look) -> bool:
        """Remember a look; True if it is at a new process: the job was started again."""
        rank, member = look.sample.rank, look.sample.member
        before = self._members.get(rank)
        if before != member:
            self._members[rank] = member
            self._looks[rank] = deque(maxlen=_KEPT)
        self._looks[rank].append(look)
        return before not in (None, member)

    def _end_all(self) -> tuple[PlainChange, ...]:
        """What was found of processes that are gone."""
        ended = tuple(PlainChange(key, "ended", finding) for key, (finding, _) in self._open.items())
        self._open.clear()
        self._left.clear()
        self._slow_since.clear()
        self._standing.clear()
        return ended

    def _judge(self, now: float) -> dict[str, tuple[Finding, bool]]:
        """All findings that hold now, by key."""
        newest = {rank: looks[-1] for rank, looks in self._looks.items()}
        if len(newest) < self._world or any(now - look.heard > _STALE_S for look in newest.values()):
            return self._held(newest)
        still_s = min(_still_s(looks) for looks in self._looks.values())
        if still_s >= self._hang_s and all(len(looks) >= _LEAST_LOOKS for looks in self._looks.values()):
            self._stood = max(look.heard for look in newest.values())
            self._standing = {rank: look.sample for rank, look in newest.items()}
            return self._stalled(newest, still_s)
        if held := self._held(newest):
            return held
        slow = self._slow()
        if slow is None:
            self._slow_since.clear()
            return {}
        key = f"{_SLOW_KEY}{slow.rank}"
        lasts = now - self._slow_since.setdefault(key, now) >= (_HARD_AFTER - 1) * _SLOW_LOOKS
        return {key: (slow, lasts and slow.layer == "dataloader")}

    def _stalled(self, newest: dict[int, _Look], still_s: float) -> dict[str, tuple[Finding, bool]]:
        finding = self._hang(newest, still_s)
        lasts = still_s >= _HARD_AFTER * self._hang_s
        if finding.kind == "undetermined" and not lasts:
            return {}
        hard = lasts and finding.kind == "noncommunication_hang" and len(finding.suspects) == 1
        return {f"plain:{finding.kind}": (finding, hard)}

    def _held(self, newest: dict[int, _Look]) -> dict[str, tuple[Finding, bool]]:
        """The hang that was found before, while no look shows that a rank moved; once one did, nothing is held."""
        if any(_moved(self._standing[rank], self._looks[rank]) for rank in newest if rank in self._standing):
            self._standing.clear()
        return {key: kept for key, kept in self._open.items() if self._standing and not key.startswith(_SLOW_KEY)}

    def _changes(self, found: dict[str, tuple[Finding, bool]]) -> tuple[PlainChange, ...]:
        changes: list[PlainChange] = []
        for key, (finding, hard) in found.items():
            self._missed[key] = 0
            before = self._open.get(key)
            if before is None:
                changes.append(PlainChange(key, "new", finding, hard))
            elif key in self._left or before[0].suspects != finding.suspects or hard != before[1]:
                changes.append(PlainChange(key, "updated", finding, hard))
            self._open[key] = (finding, hard)
            self._left.discard(key)
        unjudged = self._left if self._left and not self._can_judge() else set()
        for key in [key for key in self._open if key not in found and key not in unjudged]:
            self._missed[key] += 1
            if self._missed[key] >= _GONE_AFTER:
                finding, _ = self._open.pop(key)
                changes.append(PlainChange(key, "ended", finding))
        return tuple(changes)

    def _can_judge(self) -> bool:
        """Whether every rank was looked at as often as the slowest of the findings takes."""
        least = max(_SLOW_LOOKS, min(int(_HARD_AFTER * self._hang_s) + 1, _KEPT))
        return len(self._looks) == self._world and all(len(looks) >= least for looks in self._looks.values())

    # -------------------------------------------------------------- a job that stands still

    def _hang(self, newest: dict[int, _Look], still_s: float) -> Finding:
        waiting = {rank: look for rank, look in newest.items() if look.sample.place == "collective"}
        outside = {rank: look for rank, look in newest.items() if rank not in waiting}
        notes = (f"for {still_s:.0f} s no rank used a processor and no stack moved", *self._quiet(newest, still_s))
        if waiting and outside and len(outside) <= max(1, self._world // 4):
            return _origin(outside, waiting, notes=notes)
        if not outside:
            return _all_inside(waiting, notes)
        return Finding(
            kind="undetermined",
            victims=tuple(sorted(waiting)),
            confidence=0.3,
            evidence=(*notes, *_places(newest)),
            next_probe="the stacks of all ranks, again a minute later: which of them moved?",
        )

    def _quiet(self, newest: dict[int, _Look], still_s: float) -> list[str]:
        """What the interfaces moved in the meantime."""
        notes = []
        for node in sorted({look.node for look in newest.values()}):
            last = max(look.wall for look in newest.values() if look.node == node)
            seen = [item for item in self._network.get(node, ()) if item[0] >= last - still_s]
            if len(seen) > 1:
                rate = (seen[-1][1] - seen[0][1]) / max(seen[-1][0] - seen[0][0], 1e-3)
                notes.append(f"the interfaces of node {node} moved {rate:.0f} B/s")
        return notes

    # -------------------------------------------------------------- a job that is slowed down

    def _slow(self) -> Finding | None:
        """The one that the others mostly wait for. Looks at a job that stood still say nothing of how fast it works."""
        looks = {r: [look for look in q if look.heard > self._stood][-_SLOW_LOOKS:] for r, q in self._looks.items()}
        if any(len(newest) < _SLOW_LOOKS for newest in looks.values()) or self._world < 2:
            return None
        places = {r: Counter(look.sample.place for look in newest) for r, newest in looks.items()}
        waits = {rank: count["collective"] / _SLOW_LOOKS for rank, count in places.items()}
        suspects = [rank for rank, share in waits.items() if share <= _SUSPECT_WAITS]
        others = [share for rank, share in waits.items() if rank not in suspects]
        if len(suspects) != 1 or not others or min(others) < _OTHERS_WAIT:
            return None
        return self._slow_finding(suspects[0], places[suspects[0]], waits=waits)

    def _slow_finding(self, rank: int, places: Counter[str], *, waits: dict[int, float]) -> Finding:
        looks = list(self._looks[rank])[-_SLOW_LOOKS:]
        place, times = places.most_common(1)[0]
        span_s = max(looks[-1].wall - looks[0].wall, 1e-3)
        starved = (looks[-1].sample.run_delay_us - looks[0].sample.run_delay_us) / 1e6 / span_s
        where = Counter(look.sample.where for look in looks if look.sample.where).most_common(1)
        others = min(share for other, share in waits.items() if other != rank)
        if starved > 0.5:
            place = "starved"
        return Finding(
            kind="imbalance" if place == "starved" else "compute_slow",
            layer="host_cpu" if place == "starved" else _LAYERS.get(place, "undetermined"),
            rank=rank,
            node=looks[-1].node,
            suspects=() if place == "starved" else ((Suspect(rank=rank),),),
            victims=tuple(sorted(r for r in waits if r != rank)),
            confidence=0.75 if place == "data" else 0.6,
            evidence=(
                f"in {_SLOW_LOOKS} looks the others waited in collectives {others:.0%} of the time or more, "
                f"rank {rank} {waits[rank]:.0%}",
                f"rank {rank} was found {times} times at: {place}",
                *(f"most often at {text}" for text, _ in where),
            ),
            next_probe="the step and phase times of this rank against the others'",
        )


def _still_s(looks: deque[_Look]) -> float:
    """For how long a rank has not moved: one stack, no processor time, hardly a turn; 0 where its stack is unknown."""
    last = looks[-1]
    if not last.sample.stack and last.sample.state != "T":
        return 0.0
    first = last
    for look in reversed(looks):
        span_s = last.wall - look.wall
        busy_s = (last.sample.cpu_us - look.sample.cpu_us) / 1e6
        busy = busy_s > _BUSY_SHARE * max(span_s, 1.0) or _takes_turns(look, last)
        if look.sample.stack != last.sample.stack or busy:
            break
        first = look
    return last.wall - first.wall


def _takes_turns(look: _Look, last: _Look) -> bool:
    return last.sample.turns - look.sample.turns > _TURNS_PER_S * max(last.wall - look.wall, 1.0)


def _moved(stood: PlainSample, looks: deque[_Look]) -> bool:
    """Whether a rank that was seen standing as in `stood` did anything by the newest of `looks`."""
    last = looks[-1]
    if stood.state == "T":
        return last.sample.state != "T"
    if last.sample.stack and last.sample.stack != stood.stack:
        return True
    before = looks[max(len(looks) - 1 - _GONE_AFTER, 0)]
    busy_s = (last.sample.cpu_us - before.sample.cpu_us) / 1e6
    return busy_s > _MOVED_SHARE * max(last.wall - before.wall, float(_GONE_AFTER)) or _takes_turns(before, last)


def _origin(outside: dict[int, _Look], waiting: dict[int, _Look], *, notes: tuple[str, ...]) -> Finding:
    ranks = sorted(outside)
    first = outside[ranks[0]]
    frozen = any(look.sample.state == "T" for look in outside.values())
    return Finding(
        kind="noncommunication_hang",
        layer="host_cpu" if frozen else _LAYERS.get(first.sample.place, "undetermined"),
        rank=ranks[0] if len(ranks) == 1 else None,
        node=first.node,
        suspects=tuple((Suspect(rank=rank),) for rank in ranks),
        victims=tuple(sorted(waiting)),
        confidence=0.9 if len(ranks) == 1 else 0.6,
        evidence=(*notes, f"ranks {_some(waiting)} wait in collectives", *_places(outside)),
        next_probe="" if len(ranks) == 1 else "the stacks of these ranks: what do they wait for?",
    )


def _all_inside(waiting: dict[int, _Look], notes: tuple[str, ...]) -> Finding:
    """Everybody waits in a collective: in the same one, or one of them in another one than the rest."""
    sides = Counter(look.sample.where for look in waiting.values())
    (_, most), *rest = sides.most_common()
    minority = sorted(rank for rank, look in waiting.items() if sides[look.sample.where] < most)
    if rest and minority:
        return Finding(
            kind="collective_mismatch",
            layer="application",
            suspects=tuple((Suspect(rank=rank),) for rank in minority),
            victims=tuple(sorted(set(waiting) - set(minority))),
            confidence=0.7,
            evidence=(*notes, "all ranks wait in collectives, not all in the same one", *_places(waiting)),
            next_probe="compare the branches that lead to these lines",
        )
    return Finding(
        kind="communication_hang",
        suspects=(tuple(Suspect(rank=rank) for rank in sorted(waiting)[:64]),),
        confidence=0.5,
        evidence=(*notes, "all ranks wait in one collective that nobody finishes", *_places(waiting)),
        next_probe="a Flight Recorder dump of every rank, or an echo between the nodes, pair by pair",
    )


def _places(looks: dict[int, _Look]) -> list[str]:
    return [
        f"rank {rank} stands at {look.sample.where or look.sample.at or 'an unknown place'}"
        + (" (frozen)" if look.sample.state == "T" else "")
        for rank, look in sorted(looks.items())[:8]
    ]


def _some(ranks: dict[int, _Look]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (" and others" if len(ranks) > 8 else "")
