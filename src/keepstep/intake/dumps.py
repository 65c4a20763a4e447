"""The readers of dumps and tables of other tools, in the order in which they are asked."""

from __future__ import annotations

from keepstep.intake import bytedance, flight_recorder, inspector, ras, timings
from keepstep.intake.reading import Reader

__all__ = ["DUMP_READERS"]

DUMP_READERS: tuple[Reader, ...] = (
    flight_recorder.READER,
    ras.READER,
    inspector.READER,
    bytedance.READER,
    timings.READER,
)
"""Formats with their own marks first, tables (which are recognised by the names of columns) last."""
