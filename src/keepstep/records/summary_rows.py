"""The packed tables of a `MemberSummary`: fixed rows, little endian, so that thousands of them are read at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from keepstep.errors import RecordError

__all__ = ["GROUP_ROW", "PEER_ROW", "STEP_ROW", "packed", "unpacked"]

STEP_ROW = np.dtype(
    [
        ("step", "<u4"),
        ("duration_us", "<f4"),  # from the begin of the step to its end
        ("own_us", "<f4"),  # of it: in no collective, not waiting for data, not saving
        ("data_us", "<f4"),  # waiting for the loader, in the step or just before it
    ]
)
"""One step of one rank; times in us."""

GROUP_ROW = np.dtype(
    [
        ("hash", "<u4"),
        ("lane", "u1"),
        ("ops", "<u2"),  # bit n: operation n (`Op` of the data plane) was called
        ("size", "<u2"),
        ("group_rank", "<u2"),
        ("calls", "<u2"),
        ("nbytes", "<f4"),
        ("busy_us", "<f4"),  # sum of the durations of its calls
        ("own_us", "<f4"),  # sums over calls and peers of the four waits
        ("credit_us", "<f4"),
        ("wire_us", "<f4"),
        ("peer_us", "<f4"),
    ]
)
"""One group (and lane) over the steps since the group table before; sums in us and bytes. Counts stop at 65535."""

PEER_ROW = np.dtype(
    [
        ("lane", "u1"),
        ("peer", "<u4"),
        ("sent", "<f4"),
        ("credit_us", "<f4"),
        ("wire_us", "<f4"),
        ("peer_us", "<f4"),
    ]
)
"""One peer in one window, all groups of a lane together; sums over the window in us and bytes sent."""


def packed(rows: NDArray[np.void]) -> bytes:
    """The bytes of a table."""
    return bytes(rows.tobytes())


def unpacked(tables: Iterable[bytes], row: np.dtype[np.void]) -> NDArray[np.void]:
    """The rows of many tables, one after the other. Raises RecordError where a table holds half a row."""
    data = b"".join(tables)
    if len(data) % row.itemsize:
        raise RecordError(f"a table of {len(data)} bytes is not made of rows of {row.itemsize} bytes")
    return np.frombuffer(data, dtype=row)
