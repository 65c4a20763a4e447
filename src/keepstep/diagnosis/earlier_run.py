"""A job against an earlier run of the same script: only in the same environment, and never without saying so."""

from __future__ import annotations

from keepstep.diagnosis.baseline import Baseline, difference
from keepstep.records.finding import Finding, Layer

__all__ = ["against"]

_SLOWER = 1.1
_SHARE = 0.5
"""The part that makes at least so much of what is longer names the layer."""


def against(earlier: Baseline, now: Baseline, *, run: str) -> Finding | None:
    """What `now` says next to the baseline `earlier` of `run`; None where the steps take as long as they did.

    Another environment: that the baseline is not used, and in what it differs. Slower steps in the same one: by how
    much, and whether it is the loader.
    """
    if differs := difference(earlier, now.fingerprint):
        words = f"the baseline of run {run} is not used: it was made in another environment ({differs})"
        return Finding(kind="healthy", confidence=0.5, evidence=(words,))
    if earlier.duration_us <= 0 or now.duration_us <= _SLOWER * earlier.duration_us:
        return None
    longer_us = now.duration_us - earlier.duration_us
    data_us = now.data_us - earlier.data_us
    own_us = max((new - old for new, old in zip(now.own_us, earlier.own_us, strict=False)), default=0.0)
    layer: Layer = "undetermined"
    if data_us >= _SHARE * longer_us:
        layer = "dataloader"
    elif own_us >= _SHARE * longer_us:
        layer = "host_cpu"
    times = f"{now.duration_us / 1e3:.1f} ms against {earlier.duration_us / 1e3:.1f} ms"
    return Finding(
        kind="undetermined",
        layer=layer,
        confidence=0.5,
        evidence=(
            f"steps take {now.duration_us / earlier.duration_us:.2f} x as long as in run {run}, same environment",
            f"median step {times} over {earlier.steps} steps",
            f"a step: waiting for data {data_us / 1e3:+.1f} ms, outside collectives {own_us / 1e3:+.1f} ms",
        ),
        next_probe="all members are slower alike: what changed on the nodes, in the storage, in the script?",
    )
