"""What is normal for a job, and for which environment: a baseline is used where its fingerprint is equal."""

from __future__ import annotations

import msgspec

from keepstep.records.summary import Fingerprint

__all__ = ["Baseline", "difference"]


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
