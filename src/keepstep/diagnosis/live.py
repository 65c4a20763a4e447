"""The live analysis: what agents say in, findings that begin, change and end out. Pure; it can start again at any time.

Call `observe` a few times a second, also when nothing came. Cost: near linear in the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from keepstep.diagnosis.baseline import Baseline, against_baseline, difference
from keepstep.diagnosis.delays import hold_cells, link_verdicts
from keepstep.diagnosis.imbalance import imbalance_verdicts
from keepstep.diagnosis.job_environment import fingerprint_of
from keepstep.diagnosis.live_hang import hang_verdicts
from keepstep.diagnosis.live_ledger import end_all, settle
from keepstep.diagnosis.live_reports import take_reports
from keepstep.diagnosis.live_state import LiveFinding, Verdict, Watch, WatchPlan
from keepstep.diagnosis.pair_history import PairHistory
from keepstep.diagnosis.roles import derived_roles
from keepstep.diagnosis.silence import silence_verdicts, silent_ranks
from keepstep.diagnosis.slow_verdicts import data_verdicts, slow_verdicts
from keepstep.diagnosis.slowness import judge_step, note_spells, usual
from keepstep.diagnosis.windows import COLUMNS, History, Numbers
from keepstep.records.summary import WatchReport

__all__ = ["LiveFinding", "Watch", "WatchPlan", "baseline_of", "begin_watch", "observe", "retire"]

_WARM_UP = 2
"""The first steps of a job compile, allocate and connect: they are compared with nothing."""

_SETTLING = 8
"""As many as that of each later membership: caches are cold, and the stayers catch up."""

_ENOUGH = 32

_RANKS_A_SECOND = 8192


def begin_watch(plan: WatchPlan) -> Watch:
    """A fresh state. Findings that `plan.open` lists are known: they are not told again, but they can end."""
    watch = Watch(plan, History.empty(plan.world), PairHistory.empty())
    for finding in plan.open:
        if finding.status != "ended":
            watch.findings[finding.key] = finding
    return watch


def retire(state: Watch, ranks: Iterable[int], *, now: float) -> Watch:
    """These ranks, and no others, have ended or are in a change at `now`: their silence is nothing, their steps wait.

    Who is back counts as just heard, and the job as just begun.
    """
    away = set(ranks)
    back = state.retired - away
    for rank in back & state.seen.keys():
        state.seen[rank].heard, state.seen[rank].progress = now, None
    if back:
        state.advanced = max(state.advanced, now)
    state.retired = away
    return state


def observe(state: Watch, reports: Sequence[WatchReport], *, now: float) -> tuple[Watch, tuple[LiveFinding, ...]]:
    """What `reports` change, at `now` (wall clock, s). Uses up `state`; go on with the one it returns.

    Raises RecordError where a table in a report is torn.
    """
    changes: list[LiveFinding] = []
    if take_reports(state, reports, now=now):
        changes += end_all(state, "the membership changed")
    fresh = _complete_steps(state, now)
    alarms: list[Verdict] = list(silence_verdicts(state, now))
    if fresh:
        step = state.history.done
        roles = _roles(state)
        for number in fresh:
            judge_step(state, number, roles=roles)
            note_spells(state, number, named=set(state.anchors))
        steady = [*slow_verdicts(state, step, roles=roles), *data_verdicts(state, step), *link_verdicts(state, step)]
        if not steady:
            past = against_baseline(state, step, roles=roles, differs=_differs(state))
            steady += [Verdict(key=key, finding=finding, since=step) for key, finding in past]
        steady += imbalance_verdicts(state, step, roles=roles, quiet=not steady)
        for verdict in steady:
            if verdict.finding.kind != "imbalance":
                state.alarmed = step
            if verdict.finding.kind == "communication_slow":
                hold_cells(state, verdict.finding, step=step)
        changes += settle(state, steady, now=now, step=step)
    alarms += _standing_still(state, now)
    changes += settle(state, alarms, now=now, step=None)
    return state, tuple(changes)


def _complete_steps(watch: Watch, now: float) -> list[int]:
    """The steps that every rank that still speaks has now told; at most as many as are remembered."""
    history = watch.history
    gone = watch.retired | silent_ranks(watch, now)
    speaking = np.array([rank for rank in watch.seen if rank not in gone and rank < watch.plan.world], np.int64)
    if not len(speaking) or len(watch.seen) < watch.plan.world - len(gone - watch.seen.keys()):
        return []
    latest = int(history.latest[speaking].min())
    if latest <= history.done:
        return []
    if history.done < 0:
        newest = history.stamp[speaking]
        history.done = max(int(newest[newest >= 0].min()), latest - COLUMNS + 1) - 1 + _skipped(watch)
        if latest <= history.done:
            history.done = -1
            return []
    first = max(history.done + 1, latest - COLUMNS + 1)
    history.done = latest
    return list(range(first, latest + 1))


def _differs(watch: Watch) -> str:
    """In what this environment is another one than that of the baseline; "" where it holds."""
    return difference(watch.plan.baseline, fingerprint_of(watch)) if watch.plan.baseline else ""


def _standing_still(watch: Watch, now: float) -> tuple[Verdict, ...]:
    """The verdicts on a job that stands still; of many ranks only now and then, and in between what was said last."""
    looked, advanced, said = watch.stood
    if advanced != watch.advanced or now - looked >= watch.plan.world / _RANKS_A_SECOND:
        said = tuple(hang_verdicts(watch, now))
        watch.stood = (now, watch.advanced, said)
    return said


def _skipped(watch: Watch) -> int:
    return _SETTLING if watch.renewed else _WARM_UP


def _roles(watch: Watch) -> Numbers:
    """The role of every rank; found anew when somebody speaks to somebody new."""
    pairs = watch.pairs
    known = (len(pairs.keys), int(np.count_nonzero(pairs.messages)))
    if watch.roles is None or watch.roles[:2] != known:
        watch.roles = (*known, derived_roles(watch.plan.world, pairs))
    return watch.roles[2]


def baseline_of(state: Watch) -> Baseline | None:
    """What is normal for this job in its environment; None before it has run long enough to say."""
    history = state.history
    if history.done < 0:
        return None
    duration, _, count = usual(history.values["duration_us"], history.judged, last=history.done, newest=0)
    if count < _ENOUGH:
        return None
    data = usual(history.values["data_us"], history.judged, last=history.done, newest=0)[0]
    own = usual(history.values["own_us"], history.judged, last=history.done, newest=0)[0]
    roles = _roles(state)
    return Baseline(
        fingerprint=fingerprint_of(state),
        steps=count,
        duration_us=float(np.median(duration)),
        data_us=float(np.median(data)),
        own_us=tuple(float(np.median(own[roles == role])) for role in np.unique(roles)),
    )
