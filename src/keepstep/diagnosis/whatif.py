"""What a step would take if nobody were slow: replay of a trace with durations replaced.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), equations 1 to 5.
The ideal duration of a kind of operation is its mean over all workers and steps (computation) or its median
(communication, of which only the part after the last participant began counts).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from keepstep.diagnosis.pipeline_model import Op, PipelineModel, Seen, model_of
from keepstep.errors import RecordError
from keepstep.records.operation_trace import OperationTrace

__all__ = ["Replay", "WhatIf", "replay_of", "what_if"]

_SLOWEST_SHARE = 0.03
_NEGATIVE = -1e-2
"""Transfers that end more than this before the last participant began (clock error) count as 0 s."""
_COMPUTE = ("forward-compute", "backward-compute", "gc", "optimizer")
_SHOWN_AS = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Figures of one trace. Times are means over its steps in s; a slow-down of 1 is none."""

    measured_s: float
    """Step as it was."""
    replayed_s: float
    """Step replayed with its own durations, without gaps between operations."""
    ideal_s: float
    """Step replayed with ideal durations everywhere."""
    slow_down: float
    """replayed over ideal."""
    by_dp: dict[int, float] = field(default_factory=dict)
    """Slow-down if only this replica kept its own durations."""
    by_stage: dict[int, float] = field(default_factory=dict)
    by_kind: dict[str, float] = field(default_factory=dict)
    by_worker: dict[tuple[int, int], float] = field(default_factory=dict)
    """(dp, stage) to the smaller of the slow-downs of its replica and its stage: the estimate of the paper."""
    slowest_workers: tuple[tuple[int, int], ...] = ()
    """The slowest 3 % of the workers, at least one."""
    slowest_share: float = 0.0
    """Mw: share of the slow-down that goes away if these workers were ideal."""
    last_stage_share: float = 0.0
    """Ms: share that goes away if the last stage were ideal."""


@dataclass(slots=True)
class Replay:
    """A model with the durations of a trace: rows of the matrices are operations, columns replicas times steps."""

    model: PipelineModel
    row: dict[Op, int]
    duration: npt.NDArray[np.float64]
    """Own durations; of communication the part after the last participant began."""
    ideal: npt.NDArray[np.float64]
    replicas: int
    steps: npt.NDArray[np.int64]
    measured: npt.NDArray[np.float64]
    """Length of each step as it was, s."""

    def step_times(self, duration: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Length of each step if the operations took these durations, s."""
        end = np.zeros_like(duration)
        zero = np.zeros(duration.shape[1])
        for unit in self.model.order:
            starts = [self._start(end, op, zero=zero) for op in unit]
            begun = np.maximum.reduce(starts)
            if unit[0] in self.model.wide:
                begun = np.tile(begun.reshape(self.replicas, -1).max(axis=0), self.replicas)
            for op in unit:
                end[self.row[op]] = begun + duration[self.row[op]]
        return np.asarray(end.max(axis=0).reshape(self.replicas, -1).max(axis=0))

    def _start(self, end: npt.NDArray[np.float64], op: Op, *, zero: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        rows = [self.row[before] for before in self.model.after[op]]
        return np.asarray(end[rows].max(axis=0)) if rows else zero


def what_if(trace: OperationTrace) -> WhatIf:
    """All figures of a trace. Raises RecordError if no step of it is complete or it is no pipeline."""
    replay = replay_of(trace)
    own, ideal = replay.duration, replay.ideal
    replayed = float(replay.step_times(own).mean())
    best = float(replay.step_times(ideal).mean())
    column_dp = np.repeat(np.arange(replay.replicas), len(replay.steps))
    row_stage = np.array([op[2] for op in replay.row])
    shown = np.array([_SHOWN_AS.get(op[0], op[0]) for op in replay.row])

    def kept(mask: npt.NDArray[np.bool_]) -> float:
        """Slow-down if only the operations of the mask kept their own durations."""
        return float(replay.step_times(np.where(mask, own, ideal)).mean()) / best

    def explained(mask: npt.NDArray[np.bool_]) -> float:
        """Share of the slow-down that goes away if the operations of the mask were ideal."""
        without = float(replay.step_times(np.where(mask, ideal, own)).mean())
        return (replayed - without) / (replayed - best) if abs(replayed - best) > 1e-12 else 0.0

    by_dp = {dp: kept(np.broadcast_to(column_dp == dp, own.shape)) for dp in range(replay.replicas)}
    stages = sorted(set(row_stage.tolist()))
    by_stage = {stage: kept(np.broadcast_to((row_stage == stage)[:, None], own.shape)) for stage in stages}
    by_kind = {str(kind): kept(np.broadcast_to((shown == kind)[:, None], own.shape)) for kind in np.unique(shown)}
    workers = {(dp, stage): min(by_dp[dp], by_stage[stage]) for dp in by_dp for stage in by_stage}
    count = -(-len(workers) * 3 // 100)
    slowest = tuple(sorted(workers, key=lambda worker: (-workers[worker], worker[0], worker[1]))[:count])
    mask = np.zeros(own.shape, dtype=bool)
    for dp, stage in slowest:
        mask |= (row_stage == stage)[:, None] & (column_dp == dp)[None, :]
    return WhatIf(
        measured_s=float(replay.measured.mean()),
        replayed_s=replayed,
        ideal_s=best,
        slow_down=replayed / best,
        by_dp=by_dp,
        by_stage=by_stage,
        by_kind=by_kind,
        by_worker=workers,
        slowest_workers=slowest,
        slowest_share=explained(mask),
        last_stage_share=explained(np.broadcast_to((row_stage == stages[-1])[:, None], own.shape)),
    )


def replay_of(trace: OperationTrace) -> Replay:
    """The replay of a trace: its complete steps. Raises RecordError if there are none or it is no pipeline."""
    row, starts, ends, steps = _matrices(trace)
    replicas = int(trace.dp.max()) + 1
    model = model_of(_pattern(trace, int(steps[0])))
    if set(model.after) != set(row):
        raise RecordError("the operations of the trace differ between its replicas")
    duration = ends - starts
    for unit in model.together:
        rows = [row[op] for op in unit]
        begun = starts[rows].max(axis=0)
        if unit[0] in model.wide:
            begun = np.tile(begun.reshape(replicas, -1).max(axis=0), replicas)
        duration[rows] = ends[rows] - begun
    duration[duration <= _NEGATIVE] = 0.0
    ideal = np.empty_like(duration)
    kinds = np.array([op[0] for op in row])
    for kind in np.unique(kinds):
        part = duration[kinds == kind]
        ideal[kinds == kind] = part.mean() if kind in _COMPUTE else np.median(part)
    shape = (replicas, len(steps))
    measured = ends.max(axis=0).reshape(shape).max(axis=0) - starts.min(axis=0).reshape(shape).min(axis=0)
    return Replay(model, row, duration, ideal, replicas, steps, measured)


def _matrices(
    trace: OperationTrace,
) -> tuple[dict[Op, int], npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Row of each operation, start and end of each in each replica and complete step (s), and these steps."""
    if not len(trace.dp) or trace.dp.min() < 0 or trace.stage.min() < 0:
        raise RecordError("an empty trace, or one with negative coordinates")
    codes = np.stack([trace.kind, trace.sequence, trace.stage])
    unique, which = np.unique(codes, axis=1, return_inverse=True)
    which = which.reshape(-1)
    row = {(trace.kinds[int(kind)], int(number), int(stage)): at for at, (kind, number, stage) in enumerate(unique.T)}
    steps, step_index = np.unique(trace.step, return_inverse=True)
    replicas = int(trace.dp.max()) + 1
    if len(row) * replicas * len(steps) > 200_000_000:
        raise RecordError("the trace is too large to replay", remedy="give fewer steps of it")
    starts = np.full((len(row), replicas, len(steps)), np.nan)
    ends = starts.copy()
    starts[which, trace.dp, step_index] = trace.start
    ends[which, trace.dp, step_index] = trace.start + trace.duration
    whole = np.isfinite(starts).all(axis=(0, 1)) & np.isfinite(ends).all(axis=(0, 1))
    if not whole.any():
        raise RecordError("no step of the trace has all operations of all workers")
    flat = (len(row), -1)
    return row, starts[:, :, whole].reshape(flat), ends[:, :, whole].reshape(flat), steps[whole]


def _pattern(trace: OperationTrace, step: int) -> list[Seen]:
    """The operations of the first replica in one step."""
    found = []
    for at in np.flatnonzero((trace.dp == 0) & (trace.step == step)).tolist():
        start, duration = float(trace.start[at]), float(trace.duration[at])
        op = (trace.kinds[int(trace.kind[at])], int(trace.sequence[at]), int(trace.stage[at]))
        found.append(Seen(op, start, start + duration, int(trace.chunk[at]), int(trace.global_chunk[at])))
    return found
