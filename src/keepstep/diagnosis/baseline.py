"""What is normal for a job, and for which environment: a baseline is used where its fingerprint is equal.

A job is compared with the baseline of an earlier run of it as well as with its own past, so that one that is slow from
its first step is seen too. A baseline of another environment is not used, and findings say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from keepstep.diagnosis.windows import COLUMNS, Numbers
from keepstep.records.finding import Finding, Suspect
from keepstep.records.summary import Fingerprint

if TYPE_CHECKING:
    from keepstep.diagnosis.live_state import Watch

__all__ = ["Baseline", "against_baseline", "difference"]

_STEPS = 30
_SLOWER = 1.2
_COMPARABLE = 0.1


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over `steps` undisturbed steps of one environment, in us. `own_us` has one entry for each role."""

    fingerprint: Fingerprint
    steps: int
    duration_us: float
    data_us: float
    own_us: tuple[float, ...]


def difference(baseline: Baseline, now: Fingerprint) -> str:
    """In which parts the environments differ, in words; "" where the baseline holds."""
    parts = [
        name for name in Fingerprint.__struct_fields__ if getattr(baseline.fingerprint, name) != getattr(now, name)
    ]
    return ", ".join(parts)


def against_baseline(watch: Watch, step: int, *, roles: Numbers, differs: str) -> Iterator[tuple[str, Finding]]:
    """(key, finding) where the last steps are slower than an earlier run of the job in the same environment.

    One finding for each rank whose own time is longer than that of its role then, if they are few; otherwise the whole
    job is slower, and that is undetermined. `differs` names what is another environment now ("": nothing): then the
    baseline is not used.
    """
    baseline, history = watch.plan.baseline, watch.history
    steps = np.arange(step - _STEPS + 1, step + 1)
    if baseline is None or differs or steps[0] < 0 or not (history.judged[steps % COLUMNS] == steps).all():
        return
    lasted = float(np.median(history.of("duration_us", step, count=_STEPS)))
    if lasted < _SLOWER * baseline.duration_us:
        return
    normal = np.array(baseline.own_us)[np.minimum(roles, len(baseline.own_us) - 1)]
    own = np.median(history.of("own_us", step, count=_STEPS), axis=1)
    slow = np.flatnonzero(own - normal > _COMPARABLE * baseline.duration_us)
    words = (
        f"a step takes {lasted / 1e3:.0f} ms, and took {baseline.duration_us / 1e3:.0f} ms in an earlier run of "
        f"{baseline.steps} steps in the same environment"
    )
    cost = (lasted - baseline.duration_us) * 1e-6 * watch.plan.world
    if not 0 < len(slow) <= max(1, watch.plan.world // 4):
        yield (
            "past:job",
            Finding(
                kind="undetermined",
                confidence=0.5,
                evidence=(words, "no few ranks explain it: what all share has changed, or their work has"),
                next_probe="what differs from that run: data, settings, other jobs on the same network or storage",
                cost=cost,
            ),
        )
        return
    for rank in slow.tolist():
        yield (
            f"past:{rank}",
            Finding(
                kind="compute_slow",
                layer="host_cpu",
                suspects=((Suspect(rank=rank),),),
                confidence=0.7,
                evidence=(words, f"rank {rank} takes {own[rank] / normal[rank]:.2f} x the own time of its role then"),
                next_probe=f"speed test of the device and CPUs of rank {rank}, and its Python stacks",
                cost=cost,
            ),
        )
