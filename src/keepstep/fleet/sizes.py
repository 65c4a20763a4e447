"""Classes by size and by length: powers of two of GPUs, and round times. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["DURATIONS", "LARGEST_SMALL_GPUS", "SIZES", "duration_class", "size_class", "size_top"]

LARGEST_SMALL_GPUS = 128
"""Jobs with more GPUs than this are those of the published failure rate r_f (Meta, HPCA 2025)."""

_TOPS = np.array([8 * 2**power for power in range(18)], dtype=np.int64)
SIZES: tuple[str, ...] = tuple(
    f"{1 if top == 8 else top // 2 + 1}-{top}" for top in (int(value) for value in _TOPS)
) + (f">{int(_TOPS[-1])}",)
"""Names of the classes by GPUs; each ends at a power of two, which it includes."""

_HOUR = 3_600_000_000
_EDGES = np.array([_HOUR, 4 * _HOUR, 24 * _HOUR, 7 * 24 * _HOUR], dtype=np.int64)
DURATIONS: tuple[str, ...] = ("<1 h", "1-4 h", "4-24 h", "1-7 d", ">=7 d")
"""Names of the classes by allocated time."""


def size_class(gpus: Any) -> Any:
    """For each number of GPUs the index of its class in `SIZES`."""
    return np.searchsorted(_TOPS, np.asarray(gpus), side="left")


def size_top(index: int) -> int:
    """The most GPUs of class `index` (of the last class: twice the class before it)."""
    return int(_TOPS[index]) if index < len(_TOPS) else 2 * int(_TOPS[-1])


def duration_class(length_us: Any) -> Any:
    """For each length in microseconds the index of its class in `DURATIONS`."""
    return np.searchsorted(_EDGES, np.asarray(length_us), side="right")
