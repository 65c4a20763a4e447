"""Everything inside the training process: process group, recorder, step guard, state. The only importer of torch."""

from __future__ import annotations

__all__: list[str] = []
