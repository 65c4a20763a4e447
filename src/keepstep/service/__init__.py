"""The processes around training: agent, controller, launcher, and the tools of the command line."""

from __future__ import annotations

__all__: list[str] = []
