"""Ranks that take longer than those with the same work: log ratios of their own time, against peers and own past.

A rank is slow when the median of its last `STEPS` ratios lies above its own usual one by more than its usual scatter
allows, in nearly every one of these steps. Where a job has often seen short spells of one rank or the other, a spell
has to last longer than those before it counts: a straggler that moves on is no fault. Neither is a run of long steps
that comes about by chance where many steps of the rank, or of all ranks, are long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keepstep.diagnosis.live_state import Burst, Watch
from keepstep.diagnosis.roles import lower_medians
from keepstep.diagnosis.windows import COLUMNS, Numbers

__all__ = [
    "STEPS",
    "Excess",
    "cpu_noise",
    "forget_spell",
    "judge_step",
    "note_spells",
    "past_of",
    "present_scatter",
    "slow_ranks",
    "steps_needed",
    "usual",
]

STEPS = 6
"""Steps that a fault has to show before it is named."""

_PAST = 48
_FEW = 10
_AGAIN = 4
_MANY_RANKS = 2048
_SCATTER = 4.5  # standard errors; 1e-6 one-sided under a normal distribution
_MEDIAN_ERROR = 1.25  # standard error of a median / that of a mean, normal distribution
_LEAST_RATIO = 0.034
_LEVEL_RATIO = 0.17
_LEAST_SHARE = 0.02
_LEVEL_STEPS = 16
_ALWAYS = 0.9
_BY_CHANCE = 0.75
_MEMORY = 256
_SPELL = 0.08
_RECENT = 12
_CHANCE = 10.2  # -log of one in 27,000
_ALIKE = 0.5


@dataclass(frozen=True)
class _Tier:
    """How strong an effect has to be: over `steps` steps of which all but `misses` show it, a log ratio of `ratio` and
    `times` what the scatter allows."""

    steps: int
    misses: int
    ratio: float
    times: float


_TIERS = (
    _Tier(steps=3, misses=0, ratio=0.65, times=3.0),
    _Tier(steps=4, misses=0, ratio=0.17, times=2.0),
    _Tier(steps=STEPS, misses=1, ratio=0.13, times=1.0),
    _Tier(steps=14, misses=1, ratio=_LEAST_RATIO, times=1.0),
)


@dataclass(frozen=True)
class Excess:
    """One slow rank: log ratio over its usual one, us per step, how far beyond the limit (1: on it), `known`: its own
    past is the measure (else only its peers are), and for how many steps it has been so."""

    rank: int
    ratio: float
    excess_us: float
    margin: float
    known: bool
    steps: int


def judge_step(watch: Watch, step: int, *, roles: Numbers) -> None:
    """Fill in, for one step that all ranks have told, how each compares with its role, and the spells of slowness."""
    history = watch.history
    column = step % COLUMNS
    told = history.stamp[:, column] == step
    own = np.where(told, history.values["own_us"][:, column], np.nan)[:, None]
    data = np.where(told, history.values["data_us"][:, column], np.nan)[:, None]
    lasted = float(np.nanmedian(history.values["duration_us"][told, column])) if told.any() else 0.0
    measure = lower_medians(own, roles)[:, 0]
    floor = 0.01 * lasted + 1.0
    history.excess[:, column] = np.nan_to_num(own[:, 0] - measure)
    history.ratio[:, column] = np.nan_to_num(np.log((own[:, 0] + floor) / (measure + floor)))
    history.extra_data[:, column] = np.nan_to_num(data[:, 0] - lower_medians(data, roles * 0)[:, 0])
    history.judged[column] = step


def usual(values: Numbers, judged: Numbers, *, last: int, newest: int) -> tuple[Numbers, Numbers, int]:
    """(median, scatter, number of steps) of each rank over the past behind its `newest` steps up to `last`.

    Scatter is 1.4826 x the median absolute deviation, and at least half the typical one of all ranks.
    """
    steps = np.arange(max(0, last - newest - _PAST + 1), last - newest + 1)
    steps = steps[judged[steps % COLUMNS] == steps] if len(steps) else steps
    if not len(steps):
        return np.zeros(len(values)), np.zeros(len(values)), 0
    past = values[:, steps % COLUMNS]
    middle = np.median(past, axis=1)
    scatter = 1.4826 * np.median(np.abs(past - middle[:, None]), axis=1)
    return middle, np.maximum(scatter, 0.5 * float(np.median(scatter))), len(steps)


def past_of(watch: Watch, name: str, *, step: int) -> tuple[Numbers, Numbers, int]:
    """`usual` of one of the history's tables behind the last `STEPS` steps; measured anew every few steps.

    `name` is `ratio`, `excess`, `extra_data` or a metric. The arrays are the caller's own.
    """
    kept = watch.past.get(name)
    if kept is None or not kept[0] <= step < kept[0] + (_again(watch) if kept[3] > 2 * _FEW else 1):
        history = watch.history
        table = history.values[name] if name in history.values else getattr(history, name)
        kept = watch.past[name] = (step, *usual(table, history.judged, last=step, newest=STEPS))
    return kept[1].copy(), kept[2].copy(), kept[3]


def _again(watch: Watch) -> int:
    """After how many steps the past is measured again: it moves slowly, and of many ranks it costs."""
    return _AGAIN if watch.plan.world < _MANY_RANKS else 2 * _AGAIN


def steps_needed(watch: Watch, step: int, *, least: int = STEPS, ratio: float = 0.0) -> int:
    """How many steps in a row a rank has to be slow by `ratio`: more where spells of that kind ended by themselves."""
    lengths = [
        burst.length
        for burst in watch.bursts
        if burst.last > step - _MEMORY and burst.length >= 2 and burst.ratio > _ALIKE * ratio
    ]
    return max(least, 2 * max(lengths, default=0) + 1)


def slow_ranks(watch: Watch, step: int) -> list[Excess]:
    """The ranks whose own time is beyond what their past and their peers allow, at `step`.

    A strong effect is named soon, a weak one only when it lasts.
    """
    found: dict[int, Excess] = {}
    for tier in _TIERS:
        for one in _slower_than_usual(watch, step, tier=tier):
            found.setdefault(one.rank, one)
    for one in _slow_from_the_start(watch, step):
        found.setdefault(one.rank, one)
    return [found[rank] for rank in sorted(found)]


def _slower_than_usual(watch: Watch, step: int, *, tier: _Tier) -> Iterator[Excess]:
    """Against their own past, as one tier of the test asks for it."""
    history, count = watch.history, tier.steps
    if not _judged(history.judged, step, count=count):
        return
    middle, scatter, past = past_of(watch, "ratio", step=step)
    if past < _FEW:
        return
    columns = history.columns(step, count)
    usual_excess = past_of(watch, "excess", step=step)[0]
    for rank, anchor in watch.anchors.items():
        middle[rank], scatter[rank], usual_excess[rank] = anchor
    shifts = history.ratio[:, columns] - middle[:, None]
    scatter = np.maximum(scatter, present_scatter(shifts))
    limit = np.maximum(_LEAST_RATIO, _SCATTER * _MEDIAN_ERROR * np.maximum(scatter, 0.005) / np.sqrt(count))
    excess = np.median(history.excess[:, columns], axis=1)
    shift = np.median(shifts, axis=1)
    lasted = np.maximum(np.median(history.of("duration_us", step, count=count), axis=1), 1.0)
    matters = excess - usual_excess > _LEAST_SHARE * lasted
    above = np.count_nonzero(shifts > 0.5 * limit[:, None], axis=1) >= count - tier.misses
    strong = (shift > tier.times * limit) & (shift > tier.ratio)
    for rank in np.flatnonzero(strong & above & matters).tolist():
        spell = _spell(history.ratio[rank] - middle[rank], history.judged, step=step, limit=0.5 * float(limit[rank]))
        needed = steps_needed(watch, step, least=count, ratio=float(shift[rank])) - tier.misses
        if spell >= needed and _no_chance(watch, step, rank=rank, beyond=middle + 0.5 * shift[rank], spell=spell):
            yield Excess(rank, float(shift[rank]), float(excess[rank]), float(shift[rank] / limit[rank]), True, spell)


def present_scatter(shift: Numbers) -> Numbers:
    """How far the last steps scatter: each rank's own, and at least that of all ranks together.

    A job whose work begins to vary from step to step is seen here before its past shows it.
    """
    own = np.median(np.abs(shift - np.median(shift, axis=1)[:, None]), axis=1)
    return 1.4826 * np.maximum(own, float(np.median(np.abs(shift - np.median(shift)))))


def _slow_from_the_start(watch: Watch, step: int) -> list[Excess]:
    """Ranks that were slower than their peers in all that is remembered: nothing of their own to compare with."""
    history = watch.history
    steps = np.arange(max(0, step - COLUMNS + 1), step + 1)
    steps = steps[history.judged[steps % COLUMNS] == steps]
    if len(steps) < _LEVEL_STEPS:
        return []
    ratio, excess = history.ratio[:, steps % COLUMNS], history.excess[:, steps % COLUMNS]
    level, recent = np.median(ratio, axis=1), np.median(ratio[:, -STEPS:], axis=1)
    scatter = 1.4826 * np.median(np.abs(ratio - level[:, None]), axis=1)
    scatter = np.maximum(scatter, float(np.median(scatter)))
    limit = np.maximum(_LEVEL_RATIO, _SCATTER * _MEDIAN_ERROR * scatter / np.sqrt(_LEVEL_STEPS))
    always = np.count_nonzero(ratio > 0.5 * limit[:, None], axis=1) >= _ALWAYS * len(steps)
    lasted = max(float(np.median(history.of("duration_us", step, count=STEPS))), 1.0)
    extra = np.median(excess, axis=1)
    slow = always & (np.minimum(level, recent) > limit) & (extra > 2 * _LEAST_SHARE * lasted)
    return [
        Excess(rank, float(level[rank]), float(extra[rank]), float(level[rank] / limit[rank]), False, len(steps))
        for rank in np.flatnonzero(slow).tolist()
    ]


def _judged(judged: Numbers, step: int, *, count: int) -> bool:
    steps = np.arange(step - count + 1, step + 1)
    return bool(steps[0] >= 0 and (judged[steps % COLUMNS] == steps).all())


def _spell(ratio: Numbers, judged: Numbers, *, step: int, limit: float) -> int:
    """For how many steps up to `step` the ratio has been above `limit`; a single step below it is passed over."""
    length = back = 0
    while back < COLUMNS - 1 and step - back >= 0 and back - length < 2:
        column = (step - back) % COLUMNS
        if judged[column] != step - back:
            break
        back += 1
        if ratio[column] > limit:
            length = back
    return length


def cpu_noise(watch: Watch, step: int) -> Numbers:
    """What each rank's turns for a CPU may do to a step, in us: on a host that is short of CPUs a rank that is late by
    less than it waits for one is late by chance."""
    noise: Numbers = _BY_CHANCE * np.median(watch.history.of("delay_us", step, count=STEPS), axis=1)
    return noise


def note_spells(watch: Watch, step: int, *, named: set[int]) -> None:
    """Remember spells of at least two steps that ended with the step before `step`, of ranks that were not named."""
    history = watch.history
    if not _judged(history.judged, step, count=3):
        return
    last, before, earlier = (history.ratio[:, (step - back) % COLUMNS] for back in (0, 1, 2))
    middle, scatter, count = past_of(watch, "ratio", step=step)
    limit = np.maximum(_SPELL, 3 * scatter) + (middle if count >= _FEW else 0)
    ended = np.flatnonzero((last <= limit) & (before > limit) & (earlier > limit)).tolist()
    for rank in ended[:64]:
        if rank not in named:
            length = _run(
                history.ratio[rank], history.judged, step=step - 1, limit=float(np.broadcast_to(limit, len(last))[rank])
            )
            height = float(np.median(history.ratio[rank, history.columns(step - 1, length)]))
            watch.bursts.append(Burst(rank, step - 1, length, height))
    watch.bursts = [burst for burst in watch.bursts if burst.last > step - _MEMORY][-256:]


def _no_chance(watch: Watch, step: int, *, rank: int, beyond: Numbers, spell: int) -> bool:
    """Whether so many of a rank's `spell` steps up to `step` are `beyond` its limit that it is no chance: as few of its
    steps were before, and as few of the others' steps are now, each beyond its own limit.

    The probability is at most exp(-n KL(k/n, p)) for k of n steps, each with probability p: the bound of Chernoff, in
    W. Hoeffding, Probability inequalities for sums of bounded random variables (1963), theorem 1.
    """
    history, first = watch.history, step - spell + 1

    def columns(begin: int, end: int) -> Numbers:
        steps = np.arange(max(0, begin), end)
        return steps[history.judged[steps % COLUMNS] == steps] % COLUMNS

    def often(ranks: Numbers, steps: Numbers) -> float:
        longer = history.ratio[np.ix_(ranks, steps)] > beyond[ranks, None]
        return float(np.mean(longer)) if longer.size else 0.0

    own, others = np.array([rank]), np.delete(np.arange(len(beyond)), rank)
    before = max(often(own, columns(first - _PAST, first)), often(others, columns(first - _RECENT, step + 1)))
    now = often(own, columns(first, step + 1))
    if before == 0.0:
        return True
    if now <= before:
        return False
    beside = (1 - now) * np.log((1 - now) / (1 - before)) if now < 1 else 0.0
    return bool(spell * (now * np.log(now / before) + beside) >= _CHANCE)


def _run(ratio: Numbers, judged: Numbers, *, step: int, limit: float) -> int:
    length = 0
    while step - length >= 0 and length < COLUMNS:
        column = (step - length) % COLUMNS
        if judged[column] != step - length or ratio[column] <= limit:
            break
        length += 1
    return length


def forget_spell(watch: Watch, rank: int, *, since: int, step: int) -> None:
    """A fault has ended: what was measured during it is not usual for the rank."""
    history = watch.history
    watch.past.clear()
    anchor, _, extra = watch.anchors.pop(rank, (0.0, 0.0, 0.0))
    columns = history.columns(step, min(step - since + 1, COLUMNS))
    history.ratio[rank, columns] = anchor
    history.excess[rank, columns] = extra
