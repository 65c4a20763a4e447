"""Reports of agents into the state of the analysis; late ones of an older membership are passed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepstep.diagnosis.live_progress import hear
from keepstep.diagnosis.live_state import Seen, Watch
from keepstep.records.summary import MemberSummary, WatchReport
from keepstep.records.summary_rows import GROUP_ROW, unpacked

__all__ = ["take_reports"]


def take_reports(watch: Watch, reports: Sequence[WatchReport], *, now: float) -> bool:
    """Take in what was said by `now`; whether a new membership began with it. Raises RecordError for torn tables."""
    told = [window.generation for report in reports for window in report.windows]
    told += [progress.generation for report in reports for progress in report.progress]
    newest = max(told, default=-1)
    renewed = newest > watch.generation
    began = watch.generation >= 0 and renewed
    if renewed:
        _renew(watch, newest, now=now)
    windows: list[MemberSummary] = []
    for report in reports:
        watch.nodes[report.node] = now
        for profile in report.profiles:
            if 0 <= profile.rank < watch.plan.world:
                watch.profiles[profile.rank] = profile
        mine = [window for window in report.windows if window.generation == watch.generation]
        for window in mine:
            _heard(watch, window.rank, report=report, now=now)
        if mine:
            _advance(watch, mine, report=report, now=now)
        windows += mine
        for progress in report.progress:
            if progress.generation == watch.generation and _heard(watch, progress.rank, report=report, now=now):
                hear(watch.seen[progress.rank], progress, now=now)
    watch.history.take(windows)
    watch.pairs.take(windows, watch.plan.world)
    _learn_groups(watch, windows)
    return began


def _renew(watch: Watch, generation: int, *, now: float) -> None:
    watch.renewed = watch.generation >= 0
    watch.generation = generation
    watch.history.forget()
    watch.pairs.forget()
    watch.pair_usual = None
    watch.advanced = now
    watch.anchors.clear()
    watch.data_anchors.clear()
    watch.bursts.clear()
    watch.past.clear()
    watch.groups.clear()
    watch.placed.clear()
    for seen in watch.seen.values():
        seen.progress, seen.heard, seen.busy_at, seen.stack = None, now, 0.0, 0


def _heard(watch: Watch, rank: int, *, report: WatchReport, now: float) -> bool:
    """Note that a rank spoke; False for one that is not in the world."""
    if not 0 <= rank < watch.plan.world:
        return False
    seen = watch.seen.get(rank)
    if seen is None:
        seen = watch.seen[rank] = Seen(now)
    seen.heard, seen.node = now, report.node
    return True


def _advance(watch: Watch, windows: Sequence[MemberSummary], *, report: WatchReport, now: float) -> None:
    """When a step last ended, by the node's own clock against its own report: clocks of nodes need not agree."""
    age = max(0.0, min((report.mono_ns - window.ended_ns) / 1e9 for window in windows)) if report.mono_ns else 0.0
    watch.stepped = max(watch.stepped, now - age)
    watch.advanced = max(watch.advanced, watch.stepped)


def _learn_groups(watch: Watch, windows: Sequence[MemberSummary]) -> None:
    """Remember who is in which group, where that is new."""
    windows = [window for window in windows if window.groups and window.rank not in watch.placed]
    if not windows:
        return
    rows = unpacked([window.groups for window in windows], GROUP_ROW)
    of_row = np.repeat(
        [window.rank for window in windows], [len(window.groups) // GROUP_ROW.itemsize for window in windows]
    )
    for rank, row in zip(of_row.tolist(), rows.tolist(), strict=True):
        watch.groups.setdefault((row[0], row[1]), {})[row[4]] = rank
    watch.placed.update(window.rank for window in windows)
