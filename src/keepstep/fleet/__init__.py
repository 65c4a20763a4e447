"""What it cost: reports, and later ledgers and forecasts. Pure."""

from __future__ import annotations

__all__: list[str] = []
