"""The trace format of ByteDance's straggler study: Parquet (or CSV), one row an operation.

Columns `dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc`; times in s from the step's
start. The layout beside it (`meta-*.yaml`) is not needed: it follows from the rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from keepstep.errors import RecordError
from keepstep.intake.reading import whole
from keepstep.intake.table_files import DAMAGE
from keepstep.records.evidence import Evidence
from keepstep.records.operation_trace import OperationTrace

__all__ = ["READER", "ByteDanceTrace"]

_NEEDED = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_CHUNKS = ("mc", "mb_id", "gmc")
_MOST_ROWS = 20_000_000
_LONGEST_BYTES = 512 << 20


class ByteDanceTrace:
    """Reader of the trace format."""

    name = "ByteDance operation trace"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether the columns are those of the format."""
        if head[:4] == b"PAR1":
            try:
                return set(_NEEDED) <= set(pq.read_schema(path).names)
            except DAMAGE:
                return False
        first = head.split(b"\n", 1)[0]
        return all(name.encode() in first for name in _NEEDED)

    def read(self, path: Path) -> Iterator[Evidence]:
        """One OperationTrace. Raises RecordError if the file is damaged or lacks a column."""
        try:
            yield _trace(_table(path), str(path))
        except DAMAGE as problem:
            raise RecordError(f"damaged trace: {str(problem)[:100]}", where=str(path)) from None


READER = ByteDanceTrace()


def _table(path: Path) -> pa.Table:
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    if not parquet:
        return pa_csv.read_csv(io.BytesIO(whole(path, limit=_LONGEST_BYTES)[0]))
    file_of_columns = pq.ParquetFile(path)
    if file_of_columns.metadata.num_rows > _MOST_ROWS:
        raise RecordError(f"more than {_MOST_ROWS} rows", where=str(path), remedy="give fewer steps of it")
    known = [name for name in (*_NEEDED, *_CHUNKS) if name in file_of_columns.schema_arrow.names]
    return file_of_columns.read(columns=known)


def _trace(table: pa.Table, path: str) -> OperationTrace:
    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise RecordError(f"no column {missing[0]}", where=path)
    words = pc.dictionary_encode(pc.cast(table.column("optype"), pa.string())).combine_chunks()
    good = np.ones(table.num_rows, dtype=bool)
    columns = {}
    for name in (*_NEEDED, *_CHUNKS):
        if name == "optype":
            continue
        if name not in table.column_names:
            columns[name] = np.full(table.num_rows, 0.0)
            continue
        values = pc.cast(table.column(name), pa.float64()).to_numpy()
        good &= np.isfinite(values) if name in _NEEDED else True
        columns[name] = np.where(np.isfinite(values), values, -1.0)
    indices = words.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    good &= indices >= 0

    def whole_numbers(name: str) -> np.ndarray:
        return columns[name][good].astype(np.int64)

    return OperationTrace(
        dp=whole_numbers("dp_rank"),
        stage=whole_numbers("stage"),
        rank=whole_numbers("rank"),
        step=whole_numbers("step"),
        kind=indices[good],
        start=columns["start_ts"][good],
        duration=columns["duration"][good],
        sequence=whole_numbers("seq_id"),
        chunk=whole_numbers("mc"),
        global_chunk=whole_numbers("gmc"),
        microbatch=whole_numbers("mb_id"),
        kinds=tuple(str(word)[:100] for word in words.dictionary.to_pylist()),
        path=path,
    )
