"""The account of a fleet: its attempts, what became of their time, and the sums. Pure; parts add up to the whole.

A part is any set of whole job runs. Everything that needs only one run is done per part; the parts' columns are then
put in one order, so that any division into parts gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keepstep.fleet.attempt_arrays import AttemptArrays, exact_sum, joined_arrays
from keepstep.fleet.ledger import (
    LABELS,
    LOSSES,
    Assumptions,
    assumed,
    in_order,
    loses,
    loss_labels,
    lost_work,
    start_labels,
    unaccounted,
)
from keepstep.fleet.ledger_journal import Attempted, checkpoint_ages, journal_ledger, overlay, standby_gpus
from keepstep.fleet.sizes import SIZES, size_class

__all__ = ["Account", "Known", "account_of", "joined_accounts", "ledger_totals"]

_KEPT = LABELS.index("kept_step")
_STANDBY = LABELS.index("standby")


class Known(msgspec.Struct, frozen=True):
    """What journals and logs say: rows of `progress` and `incidents`, each with the `attempt_id` it belongs to."""

    progress: pa.Table
    incidents: pa.Table


class Account(msgspec.Struct, frozen=True):
    """Arrays over attempts beside the attempts themselves: kept wall-clock (of GPUs held by standbys nothing is kept:
    their share is taken off), work lost with the attempt by the loss rule, all losses of the ledger, all wall-clock
    [us]; whether a journal was behind it; checkpoint age (-1: unknown).

    `by_size` holds exact GPU-microseconds by class of size and label. `off` is by how much any attempt's labels do not
    add up to its length: 0.
    """

    attempts: AttemptArrays
    kept: Any
    lost: Any
    losses: Any
    journaled: Any
    age: Any
    by_size: tuple[tuple[int, ...], ...]
    off: int


def account_of(attempts: AttemptArrays, assumptions: Assumptions, *, known: Known | None = None) -> Account:
    """Divide the time of these attempts among the labels: by their journals where there are, else by assumption."""
    age = np.full(len(attempts.run), -1, np.int64)
    journaled = np.zeros(len(attempts.run), bool)
    held = np.zeros(len(attempts.run), np.int64)
    matrix = assumed(attempts, assumptions)
    if known is not None and (known.progress.num_rows or known.incidents.num_rows):
        progress = _indexed(known.progress, attempts)
        incidents = _indexed(known.incidents, attempts)
        facts = _facts(attempts)
        age = checkpoint_ages(facts, progress)
        matrix = overlay(assumed(attempts, assumptions, age=age), facts, incidents=incidents)
        journaled[progress.filter(pc.equal(progress["what"], "step"))["index"].to_numpy()] = True
        matrix[journaled] = journal_ledger(facts, progress, incidents=incidents)[journaled]
        held = standby_gpus(progress, attempts.gpus)
    return Account(
        attempts=attempts,
        kept=matrix[:, _KEPT] - _part(matrix[:, _KEPT], held, whole=attempts.gpus),
        lost=lost_work(attempts.length, assumptions.interval, age=age),
        losses=matrix[:, in_order(LOSSES)].sum(axis=1),
        journaled=journaled,
        age=age,
        by_size=_sums(attempts, matrix, held=held),
        off=unaccounted(matrix, attempts.length),
    )


def _part(time: Any, held: Any, *, whole: Any) -> Any:
    """time x held / whole, rounded down, without leaving 64 bits."""
    return time // whole * held + time % whole * held // whole


def _indexed(table: pa.Table, attempts: AttemptArrays) -> pa.Table:
    """The rows of attempts that are here, with `index`, their place among them."""
    ids = table["attempt_id"].to_numpy()
    order = np.argsort(attempts.attempt, kind="stable")
    if not len(order):
        return table.slice(0, 0).append_column("index", pa.array([], pa.int64()))
    place = order[np.minimum(np.searchsorted(attempts.attempt, ids, sorter=order), len(order) - 1)]
    here = attempts.attempt[place] == ids
    return table.filter(pa.array(here)).append_column("index", pa.array(place[here], pa.int64()))


def _facts(attempts: AttemptArrays) -> Attempted:
    """What the ledger of a journal needs of each attempt; the same rules as without one."""
    return Attempted(attempts.start, attempts.end, start_labels(attempts), loss_labels(attempts), loses(attempts))


def _sums(attempts: AttemptArrays, matrix: Any, *, held: Any) -> tuple[tuple[int, ...], ...]:
    """GPU-microseconds by class of size and label; GPUs held by standbys are theirs for the whole attempt."""
    working = attempts.gpus - held
    classes = size_class(attempts.gpus)
    rows = []
    for number in range(len(SIZES)):
        here = np.flatnonzero(classes == number)
        weights = working[here]
        row = [exact_sum(matrix[here, label] * weights) if len(here) else 0 for label in range(len(LABELS))]
        row[_STANDBY] += exact_sum(held[here] * attempts.length[here]) if len(here) else 0
        rows.append(tuple(row))
    return tuple(rows)


def joined_accounts(parts: Sequence[Account]) -> Account:
    """The account of all parts together, in order of run and life."""
    attempts, order = joined_arrays([part.attempts for part in parts])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("kept", "lost", "losses", "journaled", "age")
    }
    sums = tuple(
        tuple(sum(values) for values in zip(*rows, strict=True))
        for rows in zip(*(part.by_size for part in parts), strict=True)
    )
    return Account(attempts=attempts, by_size=sums, off=sum(part.off for part in parts), **columns)


def ledger_totals(account: Account, *, size: int | None = None) -> dict[str, int]:
    """Exact GPU-microseconds by label, of one class of sizes or of all."""
    rows = account.by_size if size is None else (account.by_size[size],)
    return {label: sum(row[column] for row in rows) for column, label in enumerate(LABELS)}
