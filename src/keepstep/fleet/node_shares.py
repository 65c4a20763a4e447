"""Which nodes an attempt held, one row a node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from keepstep.errors import RecordError

__all__ = ["spread"]


def spread(attempts: pa.Table, expand: Callable[[str], tuple[str, ...]]) -> tuple[pa.Table, list[str]]:
    """Rows of attempt_nodes for `attempts` (attempt_id, nodes, gpus), and the node lists that are not well formed.

    `expand` gives the names of a node list and raises RecordError where it cannot. GPUs are shared equally.
    """
    encoded = attempts["nodes"].combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    lists, bad = [], []
    for text in encoded.dictionary.to_pylist():
        try:
            lists.append(expand(text) if text else ())
        except RecordError:
            lists.append(())
            bad.append(text)
    names = sorted({name for names in lists for name in names})
    number = {name: index for index, name in enumerate(names)}
    counts = np.array([len(one) for one in lists] or [0], dtype=np.int64)
    flat = np.array([number[name] for one in lists for name in one], dtype=np.int32)
    begins = np.concatenate([[0], np.cumsum(counts)])
    codes = np.asarray(encoded.indices)
    each = counts[codes] if len(codes) else np.zeros(0, dtype=np.int64)
    total = int(each.sum())
    first = np.repeat(np.cumsum(each) - each, each)
    places = np.repeat(begins[codes] if len(codes) else each, each) + (np.arange(total) - first)
    ids = np.repeat(np.asarray(attempts["attempt_id"]), each)
    gpus = attempts["gpus"].to_numpy(zero_copy_only=False).astype(float) if attempts.num_rows else np.zeros(0)
    shares = np.repeat(gpus / np.maximum(each, 1), each)
    node = pa.DictionaryArray.from_arrays(pa.array(flat[places] if total else flat[:0]), pa.array(names, pa.string()))
    return (
        pa.table(
            {
                "attempt_id": pa.array(ids, pa.int64()),
                "node": node.cast(pa.string()),
                "gpus": pa.array(shares, pa.float64(), from_pandas=True),
            }
        ),
        bad,
    )
