"""What journals and training logs know of an attempt's time, as spans to paint over the ledger. Pure.

Rows are Arrow tables of `progress` and `incidents`, each with a further column `index`: the number of the attempt the
row belongs to. Times are microseconds since 1970.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keepstep.fleet.attempt_arrays import UNKNOWN
from keepstep.fleet.ledger import LABELS, in_order
from keepstep.fleet.ledger_spans import Spans, paint

__all__ = ["PRIORITY", "Attempted", "checkpoint_ages", "journal_ledger", "overlay", "standby_gpus"]

PRIORITY: tuple[str, ...] = (
    "unknown",
    "start_up",
    "kept_step",
    "data_loading",
    "compilation",
    "validation",
    "checkpoint_io",
    "telemetry",
    "link_collision",
    "suspended",
    "user_failure",
    "preemption",
    "second_order",
    "restart",
    "recomputation",
    "replacement_start_up",
    "diagnosis",
    "detection",
    "false_alarm",
    "standby",
)
"""Which label holds where two are known, the strongest last: a loss over a use, the phase of an incident over all."""

_PHASES = (("detected_us", "detection"), ("decided_us", "diagnosis"), ("joined_us", "replacement_start_up"))


class Attempted(msgspec.Struct, frozen=True):
    """Attempts that a journal knows: begin and end, the label of their beginning, of their lost end ("" : not lost)."""

    start: Any
    end: Any
    start_label: Any
    loss_label: Any
    loses: Any


def journal_ledger(attempts: Attempted, progress: pa.Table, *, incidents: pa.Table) -> Any:
    """The ledger of these attempts from their own records: one row an attempt, one column a label, in microseconds.

    Steps are kept from sample to sample; what was done after the last checkpoint of an attempt that lost its end is
    the loss its label says; before the first sample is start-up; between samples what steps do not explain is
    unknown.
    """
    order = in_order(PRIORITY)
    found = _joined([*_step_spans(attempts, progress), *_pair_spans(progress), *_incident_spans(incidents)])
    found = _joined([found, *_lost_ends(attempts, progress), *_rolled_back(attempts, progress)])
    return paint(attempts.start, attempts.end, spans=found, priority=order, ground=LABELS.index("unknown"))


def overlay(matrix: Any, attempts: Attempted, *, incidents: pa.Table) -> Any:
    """A ledger without samples of steps, corrected by the incidents that are known: their phases come out of what was
    taken for kept steps (and no more than that), so that rows still add up."""
    if not incidents.num_rows:
        return matrix
    ground = LABELS.index("unknown")
    spans = _joined(_incident_spans(incidents))
    phases = paint(attempts.start, attempts.end, spans=spans, priority=in_order(PRIORITY), ground=ground)
    phases[:, ground] = 0
    room = np.clip(matrix[:, [LABELS.index("kept_step")]] - (np.cumsum(phases, axis=1) - phases), 0, None)
    moved = np.minimum(phases, room)
    corrected = matrix + moved
    corrected[:, LABELS.index("kept_step")] -= moved.sum(axis=1)
    return corrected


def _times(table: pa.Table, name: str) -> Any:
    return pc.fill_null(table.column(name).cast(pa.int64()), int(UNKNOWN)).to_numpy()


def _said(table: pa.Table, name: str, *values: str) -> Any:
    return pc.fill_null(pc.is_in(table.column(name), value_set=pa.array(list(values))), False).to_numpy()


def _spans(attempt: Any, label: str, *, start: Any, end: Any) -> Spans:
    return Spans(attempt, np.full(len(attempt), LABELS.index(label)), start, end)


def _joined(parts: list[Spans]) -> Spans:
    return Spans(*(np.concatenate([getattr(part, field) for part in parts]) for field in Spans.__struct_fields__))


def _steps(progress: pa.Table) -> tuple[Any, Any, Any, Any]:
    """Attempt, time, step and step time of the samples of steps, in order of attempt and time."""
    table = progress.filter(pa.array(_said(progress, "what", "step")))
    columns = [_times(table, name) for name in ("index", "time", "step", "step_us")]
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return tuple(column[order] for column in columns)


def _step_spans(attempts: Attempted, progress: pa.Table) -> list[Spans]:
    index, time, step, step_us = _steps(progress)
    if not len(index):
        return []
    follows = np.append(False, index[1:] == index[:-1])
    before = np.append(time[:1], time[:-1])
    made = np.where(follows, step - np.append(step[:1], step[:-1]), step + 1)
    known = (step_us > 0) & (made > 0) & (made < 2**31)
    worked = np.where(known, np.where(known, made, 0) * np.where(known, np.minimum(step_us, 2**31), 0), time - before)
    begin = np.where(follows, before, attempts.start[index])
    kept_from = np.where(follows | known, np.maximum(begin, time - worked), time)
    first = ~follows
    return [
        _spans(index, "kept_step", start=kept_from, end=time),
        Spans(index[first], attempts.start_label[index[first]], attempts.start[index[first]], kept_from[first]),
    ]


def _pair_spans(progress: pa.Table) -> list[Spans]:
    """Spans from a `..._start` to the next `..._end` of the same attempt."""
    parts = []
    for name, label in (("validation", "validation"), ("compile", "compilation")):
        table = progress.filter(pa.array(_said(progress, "what", f"{name}_start", f"{name}_end")))
        index, time = _times(table, "index"), _times(table, "time")
        begins = _said(table, "what", f"{name}_start")
        order = np.lexsort((~begins, time, index))
        index, time, begins = index[order], time[order], begins[order]
        pair = np.flatnonzero(begins[:-1] & ~begins[1:] & (index[:-1] == index[1:]))
        parts.append(_spans(index[pair], label, start=time[pair], end=time[pair + 1]))
    return parts


def _incident_spans(incidents: pa.Table) -> list[Spans]:
    """The phases of each incident; one that replaced nobody and ended is a false alarm as a whole."""
    index, onset = _times(incidents, "index"), _times(incidents, "onset")
    first_valid = _times(incidents, "first_valid_us")
    timed = (onset != UNKNOWN) & (first_valid != UNKNOWN)
    alarm = timed & (_times(incidents, "members_changed") == 0)
    real = timed & ~alarm
    parts = [_spans(index[alarm], "false_alarm", start=onset[alarm], end=(onset + first_valid)[alarm])]
    index, at, finish = index[real], onset[real], (onset + np.where(timed, first_valid, 0))[real]
    reached = at
    for column, label in _PHASES:
        phase = _times(incidents, column)[real]
        until = np.minimum(finish, np.maximum(reached, np.where(phase == UNKNOWN, reached, at + np.maximum(phase, 0))))
        parts.append(_spans(index, label, start=reached, end=until))
        reached = until
    return [*parts, _spans(index, "recomputation", start=reached, end=finish)]


def _newest_checkpoints(attempts: Attempted, progress: pa.Table) -> Any:
    """Time of the newest checkpoint of each attempt, `UNKNOWN` where none is recorded."""
    newest = np.full(len(attempts.start), UNKNOWN)
    table = progress.filter(pa.array(_said(progress, "what", "checkpoint")))
    index, time = _times(table, "index"), _times(table, "time")
    inside = (time >= attempts.start[index]) & (time <= attempts.end[index])
    np.maximum.at(newest, index[inside], time[inside])
    return newest


def _lost_ends(attempts: Attempted, progress: pa.Table) -> list[Spans]:
    """From the newest checkpoint (or the first step, where none was written) to the end of what lost its end."""
    newest = _newest_checkpoints(attempts, progress)
    index, time, _, _ = _steps(progress)
    first = np.full(len(attempts.start), np.iinfo(np.int64).max)
    np.minimum.at(first, index, time)
    since = np.where(newest == UNKNOWN, np.minimum(first, attempts.end), newest)
    lost = np.flatnonzero(attempts.loses)
    return [Spans(lost, attempts.loss_label[lost], since[lost], attempts.end[lost])]


def _rolled_back(attempts: Attempted, progress: pa.Table) -> list[Spans]:
    """From the last sample of a step that a restored checkpoint still held to the moment it was restored."""
    restored = progress.filter(pa.array(_said(progress, "what", "restored")))
    if not restored.num_rows:
        return []
    index, time, step, _ = _steps(progress)
    where, when, version = (_times(restored, name) for name in ("index", "time", "step"))
    since = attempts.start[where].copy()
    for at in range(len(where)):
        held = time[(index == where[at]) & (time <= when[at]) & (step <= version[at])]
        since[at] = held.max() if len(held) else since[at]
    return [_spans(where, "recomputation", start=since, end=when)]


def checkpoint_ages(attempts: Attempted, progress: pa.Table) -> Any:
    """Microseconds from the newest checkpoint of each attempt to its end; -1 where none is recorded."""
    newest = _newest_checkpoints(attempts, progress)
    return np.where(newest == UNKNOWN, -1, attempts.end - newest)


def standby_gpus(progress: pa.Table, gpus: Any) -> Any:
    """GPUs of each attempt that were held by standbys: gpus x standbys / (members + standbys), rounded down."""
    held = np.zeros(len(gpus), np.int64)
    index, members, standbys = (_times(progress, name) for name in ("index", "members", "standbys"))
    known = (members > 0) & (standbys > 0)
    share = np.zeros(len(gpus), np.int64)
    np.maximum.at(share, index[known], standbys[known])
    world = np.zeros(len(gpus), np.int64)
    np.maximum.at(world, index[known], members[known])
    some = world > 0
    held[some] = np.asarray(gpus)[some] * share[some] // (world + share)[some]
    return held
