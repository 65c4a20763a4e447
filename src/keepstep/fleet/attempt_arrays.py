"""The columns of attempts as arrays: what the analyses compute on. Pure: an Arrow table in, numpy out.

All times are microseconds since 1970 in UTC; `UNKNOWN` stands for a time or id that is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["COLUMNS", "UNKNOWN", "AttemptArrays", "among", "arrays_of", "exact_sum", "joined_arrays"]

UNKNOWN = np.iinfo(np.int64).min
"""A time or an id that is not known."""

_MOST_GPU_US = 2**62
"""GPU-time of one attempt that can be reckoned with: 40,000 years of 3,000 GPUs."""

COLUMNS: tuple[str, ...] = (
    "attempt_id",
    "run_id",
    "life",
    "job_number",
    "submit",
    "eligible",
    "start",
    "end",
    "last_seen",
    "suspended_us",
    "gpus",
    "node_count",
    "ending",
    "owner",
    "failed",
    "infrastructure",
    "independent",
    "victim_of",
    "preempted_by",
    "cause",
    "partition",
    "group_key",
)
"""What is read of `attempts` and `attempt_facts`."""


class AttemptArrays(msgspec.Struct, frozen=True):
    """Attempts on GPUs that have started, sorted by run and life.

    `end` is the last moment known where it still runs. `nodes` is never 0. `cause`, `ending`, `owner`, `kind` (the
    partition) and `group` are pairs of an array of numbers and their names. `left_out` counts rows without start, end
    or GPUs and those of an absurd length, `turned` those that ended before they began (their length is taken for 0).
    """

    attempt: Any
    run: Any
    life: Any
    job: Any
    submit: Any
    eligible: Any
    start: Any
    end: Any
    suspended: Any
    gpus: Any
    nodes: Any
    running: Any
    failed: Any
    infrastructure: Any
    independent: Any
    victim_of: Any
    preempted_by: Any
    cause: tuple[Any, tuple[str, ...]]
    ending: tuple[Any, tuple[str, ...]]
    owner: tuple[Any, tuple[str, ...]]
    kind: tuple[Any, tuple[str, ...]]
    group: tuple[Any, tuple[str, ...]]
    left_out: int
    turned: int

    @property
    def length(self) -> Any:
        """Allocated wall-clock of each attempt in microseconds."""
        return self.end - self.start

    def ended(self, *names: str) -> Any:
        """Whether each attempt's ending is one of `names`."""
        return among(self.ending, names)


def among(coded: tuple[Any, tuple[str, ...]], names: tuple[str, ...]) -> Any:
    """Whether each entry of a coded column is one of `names`."""
    wanted = [index for index, name in enumerate(coded[1]) if name in names]
    return np.isin(coded[0], wanted)


def arrays_of(table: pa.Table, *, group: str = "group_key") -> AttemptArrays:
    """The arrays of a table of attempts joined with their facts (`COLUMNS`); `group` is the column of groups."""
    start, ends = _numbers(table, "start"), _numbers(table, "end")
    running = ends == UNKNOWN
    end = np.where(running, _numbers(table, "last_seen"), ends)
    gpus = _numbers(table, "gpus")
    good = (start != UNKNOWN) & (end != UNKNOWN) & (gpus > 0)
    absurd = good & (np.where(good, end, 0) - np.where(good, start, 0) > _MOST_GPU_US // np.maximum(gpus, 1))
    good &= ~absurd
    run, life = _numbers(table, "run_id"), _numbers(table, "life")
    order = np.flatnonzero(good)
    order = order[np.lexsort((start[order], life[order], run[order]))]

    def taken(values: Any) -> Any:
        return values[order]

    turned = taken(end) < taken(start)
    nodes = taken(_numbers(table, "node_count"))
    return AttemptArrays(
        attempt=taken(_numbers(table, "attempt_id")),
        run=taken(run),
        life=taken(life),
        job=taken(_numbers(table, "job_number")),
        submit=taken(_numbers(table, "submit")),
        eligible=taken(_numbers(table, "eligible")),
        start=taken(start),
        end=np.maximum(taken(end), taken(start)),
        suspended=np.maximum(taken(_numbers(table, "suspended_us")), 0),
        gpus=taken(gpus),
        nodes=np.where(nodes > 0, nodes, -(-taken(gpus) // 8)),
        running=taken(running),
        failed=taken(_flags(table, "failed")),
        infrastructure=taken(_flags(table, "infrastructure")),
        independent=taken(_flags(table, "independent")),
        victim_of=taken(_numbers(table, "victim_of")),
        preempted_by=taken(_numbers(table, "preempted_by")),
        cause=_coded(table, "cause", order=order),
        ending=_coded(table, "ending", order=order),
        owner=_coded(table, "owner", order=order),
        kind=_coded(table, "partition", order=order),
        group=_coded(table, group, order=order),
        left_out=len(good) - int(good.sum()) - int((gpus == 0).sum()),
        turned=int(turned.sum()),
    )


def joined_arrays(parts: Sequence[AttemptArrays]) -> tuple[AttemptArrays, Any]:
    """All attempts of the parts in order of run and life, and the order that brings concatenated columns there."""
    fields: dict[str, Any] = {}
    for name in AttemptArrays.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], int):
            fields[name] = sum(values)
        else:
            fields[name] = _recoded(values) if isinstance(values[0], tuple) else np.concatenate(values)
    order = np.lexsort((fields["start"], fields["life"], fields["run"]))
    for name, value in fields.items():
        if isinstance(value, tuple):
            fields[name] = (value[0][order], value[1])
        elif not isinstance(value, int):
            fields[name] = value[order]
    return AttemptArrays(**fields), order


def _recoded(coded: list[tuple[Any, tuple[str, ...]]]) -> tuple[Any, tuple[str, ...]]:
    names = sorted({name for _, known in coded for name in known})
    place = {name: number for number, name in enumerate(names)}
    maps = [np.array([place[name] for name in known] or [0], np.int32) for _, known in coded]
    return np.concatenate([maps[at][codes] for at, (codes, _) in enumerate(coded)]), tuple(names)


def _numbers(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    return pc.fill_null(column.cast(pa.int64()), int(UNKNOWN)).to_numpy()


def _flags(table: pa.Table, name: str) -> Any:
    return pc.fill_null(table.column(name), False).to_numpy()


def _coded(table: pa.Table, name: str, *, order: Any) -> tuple[Any, tuple[str, ...]]:
    column = pc.fill_null(table.column(name), "")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return column.indices.to_numpy(zero_copy_only=False)[order], tuple(column.dictionary.to_pylist())


def exact_sum(values: Any) -> int:
    """The sum of integers of 64 bits, which may itself need more."""
    whole = np.asarray(values, np.int64)
    return (int((whole >> 32).sum()) << 32) + int((whole & 0xFFFFFFFF).sum())
