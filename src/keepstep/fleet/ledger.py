"""The ledger: every second of every allocated GPU under exactly one label. Pure, in whole microseconds.

Wall-clock of an attempt is divided among the labels; GPU time is that times its GPUs. From the scheduler's account
alone the division rests on `Assumptions`, which are printed with it; journals and logs replace them
(`keepstep.fleet.ledger_journal`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.attempt_arrays import AttemptArrays, exact_sum

__all__ = [
    "LABELS",
    "LOSSES",
    "Assumptions",
    "LedgerLine",
    "assumed",
    "in_order",
    "ledger_lines",
    "loses",
    "loss_labels",
    "lost_work",
    "start_labels",
    "unaccounted",
]

LABELS: tuple[str, ...] = (
    "kept_step",
    "start_up",
    "data_loading",
    "compilation",
    "validation",
    "checkpoint_io",
    "suspended",
    "unknown",
    "detection",
    "diagnosis",
    "restart",
    "recomputation",
    "replacement_start_up",
    "standby",
    "telemetry",
    "false_alarm",
    "second_order",
    "preemption",
    "user_failure",
    "link_collision",
)
"""All labels. `unknown` is time nobody can tell about; `preemption` is work lost to the scheduler without a failure,
`second_order` work lost because a failed job took the place, `user_failure` work lost to the user's own program."""

LOSSES: tuple[str, ...] = LABELS[LABELS.index("detection") :]
"""Labels that are losses, `checkpoint_io` not among them: it is the price of losing less."""

_INDEX = {label: index for index, label in enumerate(LABELS)}
_MINUTE_US = 60_000_000


class Assumptions(msgspec.Struct, frozen=True):
    """What the scheduler's account does not say, in microseconds: checkpoints every `interval`, each standing still
    for `write`; `startup` from the start of an attempt to its first step."""

    interval: int = 60 * _MINUTE_US
    startup: int = 5 * _MINUTE_US
    write: int = 0

    def said(self) -> str:
        """The assumptions in words."""
        interval, startup, write = (
            f"{value / _MINUTE_US:g} min" for value in (self.interval, self.startup, self.write)
        )
        return (
            f"a checkpoint every {interval} that stands still for {write}; {startup} from start to first step; work "
            f"since the last checkpoint is min(run time, half the interval) where its age is not known; all other "
            f"time of a job is kept steps; of cancelled and timed-out jobs that last part is unknown"
        )


def lost_work(length: Any, interval: int, *, age: Any = None) -> Any:
    """Work lost with an attempt of `length`: min(run time, interval/2) (Meta, HPCA 2025, section 4.4; hourly: 30 min).

    `age` is the true age of the newest checkpoint at the end where known (negative: not known). All microseconds.
    """
    ran = np.asarray(length, np.int64)
    assumed_loss = np.minimum(ran, interval // 2)
    if age is None:
        return assumed_loss
    known = np.asarray(age, np.int64)
    return np.where(known >= 0, np.minimum(ran, known), assumed_loss)


def assumed(attempts: AttemptArrays, assumptions: Assumptions, *, age: Any = None) -> Any:
    """The ledger from the scheduler's account: int64, one row an attempt, one column a label; rows add up to lengths.

    Carved out in this order: suspension, the end (work that was lost), the beginning (start-up, or restart after a
    failure), checkpoint writes; what is left are kept steps.
    """
    length = attempts.length
    matrix = np.zeros((len(length), len(LABELS)), np.int64)
    suspended = np.minimum(attempts.suspended, length)
    matrix[:, _INDEX["suspended"]] = suspended
    left = length - suspended
    tail = np.where(loses(attempts), lost_work(left, assumptions.interval, age=age), 0)
    row = np.arange(len(length))
    matrix[row, loss_labels(attempts)] += tail
    left = left - tail
    begin = np.minimum(left, assumptions.startup)
    matrix[row, start_labels(attempts)] += begin
    left = left - begin
    period = assumptions.interval + assumptions.write
    written = left // period * assumptions.write if period else np.zeros_like(left)
    matrix[:, _INDEX["checkpoint_io"]] = written
    matrix[:, _INDEX["kept_step"]] = left - written
    return matrix


def loses(attempts: AttemptArrays) -> Any:
    """Attempts whose last work may not have been kept: all but those that completed, run on or were resized."""
    return ~attempts.running & ~attempts.ended("completed", "running", "resized")


def loss_labels(attempts: AttemptArrays) -> Any:
    """The label (column) of the work lost with each attempt, if it loses any."""
    label = np.full(len(attempts.run), _INDEX["unknown"])
    label[attempts.failed] = _INDEX["user_failure"]
    label[attempts.infrastructure] = _INDEX["recomputation"]
    label[attempts.ended("preempted")] = _INDEX["preemption"]
    label[attempts.victim_of > 0] = _INDEX["second_order"]
    return label


def start_labels(attempts: AttemptArrays) -> Any:
    """The label (column) of each beginning: start-up, or of later lives what ended the life before (a failure ...)."""
    label = np.full(len(attempts.run), _INDEX["start_up"])
    if not len(label):
        return label
    follows = np.append(False, attempts.run[1:] == attempts.run[:-1])
    before = np.append(0, np.arange(len(label) - 1))
    label[follows & attempts.failed[before]] = _INDEX["user_failure"]
    label[follows & attempts.infrastructure[before]] = _INDEX["restart"]
    label[follows & attempts.ended("preempted")[before]] = _INDEX["preemption"]
    label[follows & (attempts.victim_of > 0)[before]] = _INDEX["second_order"]
    return label


def unaccounted(matrix: Any, length: Any) -> int:
    """Microseconds by which any row does not add up to its length: 0, or the ledger is wrong."""
    return exact_sum(np.abs(matrix.sum(axis=1) - np.asarray(length, np.int64)))


class LedgerLine(msgspec.Struct, frozen=True):
    """One label: its time in GPU-microseconds (exact), in GPU-hours, and as a share of everything allocated."""

    label: str
    gpu_us: int
    gpu_hours: float
    share: float


def ledger_lines(totals: dict[str, int]) -> tuple[LedgerLine, ...]:
    """The lines of a ledger with these GPU-microseconds by label, in the order of `LABELS`, empty ones left out."""
    allocated = sum(totals.values())
    return tuple(
        LedgerLine(label, totals[label], totals[label] / 3.6e9, totals[label] / allocated)
        for label in LABELS
        if totals.get(label)
    )


def in_order(labels: tuple[str, ...]) -> tuple[int, ...]:
    """Column numbers of `labels` in a ledger's matrix."""
    return tuple(_INDEX[label] for label in labels)
