"""Operations of a pipeline-parallel job in columns: the trace format that ByteDance published with its straggler study.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025) and its data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["OperationTrace"]


@dataclass(frozen=True, slots=True, eq=False)
class OperationTrace:
    """One entry an operation. `kind[i]` indexes `kinds`; times are seconds, `start` from the step's start."""

    dp: npt.NDArray[np.int64]
    stage: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    start: npt.NDArray[np.float64]
    duration: npt.NDArray[np.float64]
    sequence: npt.NDArray[np.int64]
    """Number of the operation among those of its kind in the step and rank."""
    chunk: npt.NDArray[np.int64]
    """Model chunk on the stage (virtual pipeline), -1 where it does not apply."""
    global_chunk: npt.NDArray[np.int64]
    """Model chunk counted through the whole model, -1 where it does not apply."""
    microbatch: npt.NDArray[np.int64]
    kinds: tuple[str, ...] = field(default=())
    path: str = ""
