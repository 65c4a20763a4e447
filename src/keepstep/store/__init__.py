"""Where it is kept and how it travels: journal, state stores and the wire, each with its in-memory twin."""

from __future__ import annotations

__all__: list[str] = []
