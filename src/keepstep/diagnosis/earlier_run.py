"""A baseline of an earlier run that does not hold here: said once, so that nobody takes it for compared."""

from __future__ import annotations

from keepstep.diagnosis.baseline import Baseline, difference
from keepstep.records.finding import Finding
from keepstep.records.summary import Fingerprint

__all__ = ["not_compared"]


def not_compared(earlier: Baseline, now: Fingerprint, *, run: str) -> Finding | None:
    """That the baseline of `run` is not used in the environment `now`, and why; None where it holds."""
    differs = difference(earlier, now)
    if not differs:
        return None
    words = f"the baseline of run {run} is not used: it was made in another environment ({differs})"
    return Finding(kind="healthy", confidence=0.5, evidence=(words,))
