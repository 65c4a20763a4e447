"""What a trace of operations says: one slow worker, a heavy stage, uneven sequences, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keepstep.diagnosis.whatif import WhatIf, what_if
from keepstep.errors import RecordError
from keepstep.records.finding import Finding, Suspect
from keepstep.records.operation_trace import OperationTrace

__all__ = ["diagnose_trace"]

_STRAGGLING = 1.1
"""Slow-down from which the paper counts a job as straggling."""
_NOTICED = 1.05
_MOST = 0.5
"""Share of the slow-down that has to go away for a cause to be the cause."""
_SAME_CAUSE = 0.9
"""Correlation of forward and backward times of a micro-batch from which its sequence length is the cause (5.3)."""
_PERHAPS_SAME = 0.75
"""From here on it is the most likely one."""
_SLOW_WORKER = 1.15
_SHOWN = 4


def diagnose_trace(trace: OperationTrace) -> tuple[Finding, ...]:
    """One finding for each slow worker, or one about the job; `undetermined` if the trace cannot be replayed."""
    try:
        figures = what_if(trace)
    except RecordError as problem:
        return (
            Finding(
                kind="undetermined",
                confidence=0.1,
                evidence=(f"the trace cannot be replayed: {problem.what}",),
                next_probe="a trace with all operations of all workers of at least one step",
            ),
        )
    said = _figures_in_words(figures)
    if figures.slow_down < _NOTICED:
        return (Finding(kind="healthy", confidence=0.8, evidence=said),)
    slow = _slow_workers(trace, figures)
    if figures.slowest_share >= _MOST and slow:
        return tuple(_worker(trace, figures, worker=worker, ratio=ratio, said=said) for worker, ratio in slow)
    return (_uneven(trace, figures, said=said),)


def _worker(
    trace: OperationTrace, figures: WhatIf, *, worker: tuple[int, int], ratio: float, said: tuple[str, ...]
) -> Finding:
    dp, stage = worker
    ranks = np.unique(trace.rank[(trace.dp == dp) & (trace.stage == stage)])
    lost = figures.replayed_s - figures.ideal_s
    return Finding(
        kind="compute_slow",
        suspects=((Suspect(dp=dp, stage=stage),),),
        confidence=min(0.95, 0.6 + 0.35 * figures.slowest_share) if figures.slow_down >= _STRAGGLING else 0.6,
        evidence=(
            f"the worker of replica {dp}, stage {stage} (rank {', '.join(str(rank) for rank in ranks[:8])}) computes "
            f"{ratio:.2f} times as long as the same stage of the other replicas",
            *said,
        ),
        next_probe="clocks, temperature and throttle reasons of all devices of the worker (one rank of it is traced)",
        cost=lost * len(figures.by_worker) * _devices(trace),
    )


def _uneven(trace: OperationTrace, figures: WhatIf, *, said: tuple[str, ...]) -> Finding:
    """The job is slowed down, and not by single workers."""
    lost = (figures.replayed_s - figures.ideal_s) * len(figures.by_worker) * _devices(trace)
    last = max(figures.by_stage)
    if figures.last_stage_share >= _MOST:
        why = f"the last stage ({last}) has more to do than the others: no worker is at fault"
        probe = "move layers from the last stage to the others (the loss layer counts too)"
        confidence = 0.9
    elif (alike := _alike(trace)) >= _PERHAPS_SAME:
        why = f"forward and backward times of a micro-batch go together (correlation {alike:.2f}): uneven sequences"
        probe = "spread sequence lengths evenly over micro-batches and replicas"
        confidence = 0.85 if alike >= _SAME_CAUSE else 0.55
    else:
        kind, share = max(figures.by_kind.items(), key=lambda item: item[1])
        compute = kind in ("forward-compute", "backward-compute")
        why = f"no worker, no stage and no sequence lengths explain it; most is in {kind} ({share:.2f} times)"
        probe = "garbage collection, data loading and memory management on all ranks" if compute else "network counters"
        if not compute and share >= _NOTICED:
            return Finding(
                kind="communication_slow", confidence=0.4, evidence=(why, *said), next_probe=probe, cost=lost
            )
        return Finding(kind="undetermined", confidence=0.3, evidence=(why, *said), next_probe=probe, cost=lost)
    return Finding(
        kind="imbalance",
        layer="application",
        confidence=confidence,
        evidence=(why, *said),
        next_probe=probe,
        cost=lost,
    )


def _figures_in_words(figures: WhatIf) -> tuple[str, ...]:
    return (
        f"a step takes {figures.replayed_s:.3f} s, with ideal durations everywhere {figures.ideal_s:.3f} s: "
        f"slow-down {figures.slow_down:.3f}",
        f"the slowest {len(figures.slowest_workers)} of {len(figures.by_worker)} workers explain "
        f"{figures.slowest_share:.1%} of it, the last stage {figures.last_stage_share:.1%}",
        "slow-down if only one of them kept its own durations: "
        + f"replicas {_most(figures.by_dp)}; stages {_most(figures.by_stage)}; operations {_most(figures.by_kind)}",
    )


def _most(slow_downs: Mapping[int, float] | Mapping[str, float]) -> str:
    """The largest few of the slow-downs, with their names."""
    ordered = sorted(slow_downs.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.3f}" for name, value in ordered[:_SHOWN])


def _slow_workers(trace: OperationTrace, figures: WhatIf) -> list[tuple[tuple[int, int], float]]:
    """Among the slowest 3 % those whose own computation is long beside the same stage of the others, with the ratio."""
    means = _compute_means(trace)
    found = []
    for worker in figures.slowest_workers:
        peers = [mean for (dp, stage), mean in means.items() if stage == worker[1] and dp != worker[0]]
        if not peers:
            peers = [mean for (_, stage), mean in means.items() if stage not in (worker[1], max(figures.by_stage))]
        if peers and worker in means and means[worker] / float(np.median(peers)) >= _SLOW_WORKER:
            found.append((worker, means[worker] / float(np.median(peers))))
    return found


def _compute_means(trace: OperationTrace) -> dict[tuple[int, int], float]:
    """Mean duration of computation of each worker, s."""
    compute = np.isin(trace.kind, _numbers(trace, "forward-compute", "backward-compute"))
    codes = trace.dp[compute] * (trace.stage.max() + 1) + trace.stage[compute]
    sums, counts = np.bincount(codes, trace.duration[compute]), np.bincount(codes)
    width = int(trace.stage.max()) + 1
    return {(int(at) // width, int(at) % width): float(sums[at] / counts[at]) for at in np.flatnonzero(counts)}


def _alike(trace: OperationTrace) -> float:
    """Median over stages of the correlation of forward and backward times of the same micro-batch; the last is out.

    Micro-batches are matched by number within step, replica, stage and chunk. 0 if there are too few.
    """
    last = int(trace.stage.max())
    forward, backward = _numbers(trace, "forward-compute"), _numbers(trace, "backward-compute")
    found = []
    for stage in range(last if last > 0 else 1):
        pair = []
        for numbers in (forward, backward):
            chosen = np.isin(trace.kind, numbers) & (trace.stage == stage)
            keys = np.stack([trace.step, trace.dp, trace.chunk, trace.microbatch])[:, chosen]
            order = np.lexsort(keys)
            pair.append((keys[:, order], trace.duration[chosen][order]))
        (one, first), (two, second) = pair
        if (
            one.shape == two.shape
            and one.shape[1] >= 16
            and bool((one == two).all())
            and first.std() > 0 < second.std()
        ):
            found.append(float(np.corrcoef(first, second)[0, 1]))
    return float(np.median(found)) if found else 0.0


def _devices(trace: OperationTrace) -> int:
    """Devices of a worker: the common step between the ranks that were traced."""
    return max(1, int(np.gcd.reduce(np.diff(np.unique(trace.rank))))) if len(np.unique(trace.rank)) > 1 else 1


def _numbers(trace: OperationTrace, *kinds: str) -> list[int]:
    return [number for number, kind in enumerate(trace.kinds) if kind in kinds]
