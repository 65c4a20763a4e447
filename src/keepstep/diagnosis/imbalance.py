"""Time that is lost because the work is uneven, with nobody to blame: told once, without suspects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keepstep.diagnosis.live_state import Verdict, Watch
from keepstep.diagnosis.windows import COLUMNS, Numbers
from keepstep.records.finding import Finding

__all__ = ["imbalance_verdicts"]

_STEPS = 32
_SHARE = 0.15
_OFTEN = 0.8


def imbalance_verdicts(watch: Watch, step: int, *, roles: Numbers, quiet: bool) -> Iterator[Verdict]:
    """A verdict where the slowest rank of each step costs the others much of it and it is not always the same one.

    Nothing unless it is otherwise `quiet`: a fault explains uneven times by itself.
    """
    history = watch.history
    steps = np.arange(step - _STEPS + 1, step + 1)
    if not quiet or steps[0] <= watch.alarmed or not (history.judged[steps % COLUMNS] == steps).all():
        return
    own = history.of("own_us", step, count=_STEPS)
    lasted = np.median(history.of("duration_us", step, count=_STEPS), axis=0)
    lost = own.max(axis=0) - np.median(own, axis=0)
    share = float(np.mean(lost / np.maximum(lasted, 1.0)))
    open_already = "imbalance" in watch.findings
    if share < (_SHARE / 2 if open_already else _SHARE):
        return
    worst = own.argmax(axis=0)
    held = np.unique(roles[worst], return_counts=True)
    several = len(np.unique(roles)) > 1
    if several and held[1].max() >= _OFTEN * _STEPS:
        stage = int(held[0][held[1].argmax()])
        how = f"the slowest rank is nearly always one of stage {stage}: that stage has more work"
    elif np.unique(worst, return_counts=True)[1].max() < _OFTEN * _STEPS:
        count = len(np.unique(worst))
        how = f"{count} different ranks were the slowest: the work of each step is uneven, or a disturbance moves on"
    else:
        return
    finding = Finding(
        kind="imbalance",
        layer="application",
        confidence=0.75,
        evidence=(f"the slowest rank takes {share:.0%} of the step longer than the middle one ({_STEPS} steps)", how),
        next_probe="work per rank and step: sequence lengths, layers of each stage, garbage collection, CPU binding",
        cost=float(np.mean(lost)) * 1e-6 * watch.plan.world,
    )
    yield Verdict(key="imbalance", finding=finding, since=step - _STEPS + 1)
