"""Rows of job_runs from the attempts behind them: sums over neighbours in one order, no joins. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["OF_FIRST", "run_rows"]

OF_FIRST = ("cluster", "name", "user", "account", "partition", "qos", "group_key")
"""Columns that a run has from its first attempt."""

_MOST = 2**63 - 1
_SAFE = 2.0**62


def run_rows(lives: pa.Table, names: pa.Table, *, loops: np.ndarray) -> pa.Table:
    """The table job_runs, ordered by run.

    `lives` has one row an attempt, ordered by attempt_id: attempt_id, run_id, life, how, failed, independent, state,
    came, start, end, until, gpus and node_count; `names` has attempt_id and `OF_FIRST` in any order. `loops` are the
    runs that are crash loops. GPUs and nodes of a run are those of its largest life; parts of a heterogeneous job are
    one life.
    """
    lives = lives.combine_chunks()
    if not lives.num_rows:
        return _empty()
    life, run = lives["life"].to_numpy(), lives["run_id"].to_numpy()
    order = np.lexsort((life, run))
    run = run[order]
    begins = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
    last = np.r_[begins[1:], len(run)] - 1
    state = lives["state"].dictionary_encode().combine_chunks()
    codes, states = state.indices.to_numpy()[order], state.dictionary.to_pylist()
    how = lives["how"].dictionary_encode().combine_chunks()
    hows, how_names = how.indices.to_numpy()[order], how.dictionary.to_pylist()
    resized = np.r_[False, _is(codes, states, wanted="RESIZING")[:-1]]
    resized[begins] = True
    counts = {
        "attempts": np.ones(len(run), bool),
        "requeues": _is(hows, how_names, wanted="requeue") & ~resized,
        "retries": _is(hows, how_names, wanted="retry"),
        "failures": lives["failed"].to_numpy()[order],
        "independent": lives["independent"].to_numpy()[order],
        "preemptions": _is(codes, states, wanted="PREEMPTED"),
    }
    ids = names["attempt_id"].to_numpy()
    by_id = np.argsort(ids)
    firsts = pa.array(by_id[np.searchsorted(ids, run[begins], sorter=by_id)])
    columns: dict[str, Any] = {"run_id": pa.array(run[begins])}
    columns |= {name: names[name].take(firsts) for name in OF_FIRST}
    columns |= {name: pa.array(np.add.reduceat(mask, begins, dtype=np.int32)) for name, mask in counts.items()}
    columns["crash_loop"] = pa.array(np.isin(run[begins], loops))
    columns |= _amounts(lives, order, begins=begins, life=life[order])
    columns["state"] = state.dictionary.take(pa.array(codes[last]))
    return pa.table(columns)


def _amounts(lives: pa.Table, order: np.ndarray, *, begins: np.ndarray, life: np.ndarray) -> dict[str, pa.Array]:
    """Sizes, times and allocations of each run."""
    starts, has_start = _numbers(lives, "start", order=order)
    until, has_until = _numbers(lives, "until", order=order)
    held = np.where(has_start & has_until, np.maximum(until - starts, 0), 0)
    gpus, has_gpus = _numbers(lives, "gpus", order=order)
    ends, has_end = _numbers(lives, "end", order=order)
    all_ended = np.logical_and.reduceat(has_end, begins)
    begun = np.zeros(len(order), bool)
    begun[begins] = True
    pieces = np.flatnonzero(begun | np.r_[True, life[1:] != life[:-1]])
    places = np.searchsorted(pieces, begins)
    sizes = {}
    for name, (values, known) in (
        ("gpus", (gpus, has_gpus)),
        ("node_count", _numbers(lives, "node_count", order=order)),
    ):
        sums, some = np.add.reduceat(values, pieces), np.logical_or.reduceat(known, pieces)
        most = np.maximum.reduceat(np.where(some, sums, -1), places)
        sizes[name] = pa.array(most, mask=most < 0)
    return sizes | {
        "submit": _earliest(*_numbers(lives, "came", order=order), begins=begins),
        "start": _earliest(starts, has_start, begins=begins),
        "end": _times(np.maximum.reduceat(ends, begins), ~all_ended),
        "allocated_us": pa.array(np.add.reduceat(held, begins)),
        "gpu_us": _products(held, gpus, known=has_gpus, begins=begins),
    }


def _products(held: np.ndarray, gpus: np.ndarray, *, known: np.ndarray, begins: np.ndarray) -> pa.Array:
    """The sum of held x gpus of each run, at most what 64 bits hold; null where no attempt's GPUs are known."""
    with np.errstate(over="ignore"):
        sums = np.add.reduceat(held * gpus, begins)
    about = np.add.reduceat(held.astype(float) * gpus, begins)
    ends = np.r_[begins[1:], len(held)]
    for place in np.flatnonzero(about > _SAFE):
        part = slice(begins[place], ends[place])
        whole = sum(int(time) * int(many) for time, many in zip(held[part], gpus[part], strict=True))
        sums[place] = min(whole, _MOST)
    return pa.array(sums, mask=~np.logical_or.reduceat(known, begins))


def _numbers(table: pa.Table, name: str, *, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A column as integers in `order` (0 where null), and where it is not null."""
    column = table[name]
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    return pc.fill_null(column.cast(pa.int64()), 0).to_numpy()[order], column.is_valid().to_numpy()[order]


def _earliest(values: np.ndarray, known: np.ndarray, *, begins: np.ndarray) -> pa.Array:
    least = np.minimum.reduceat(np.where(known, values, _MOST), begins)
    return _times(least, ~np.logical_or.reduceat(known, begins))


def _times(values: np.ndarray, unknown: np.ndarray) -> pa.Array:
    return pa.array(np.where(unknown, 0, values), mask=unknown).cast(pa.timestamp("us"))


def _is(codes: np.ndarray, names: list[str], *, wanted: str) -> np.ndarray:
    return codes == (names.index(wanted) if wanted in names else -1)


def _empty() -> pa.Table:
    numbers = ("attempts", "requeues", "retries", "failures", "independent", "preemptions", "gpus", "node_count")
    columns: dict[str, pa.Array] = {name: pa.array([], pa.int64()) for name in ("run_id", *numbers)}
    columns |= {name: pa.array([], pa.string()) for name in (*OF_FIRST, "state")}
    columns |= {name: pa.array([], pa.timestamp("us")) for name in ("submit", "start", "end")}
    columns |= {name: pa.array([], pa.int64()) for name in ("allocated_us", "gpu_us")}
    return pa.table(columns | {"crash_loop": pa.array([], pa.bool_())})
