"""What a batch looks like, in words: a part of the environment that makes a step time normal."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["shape_words"]

_MOST_PARTS = 8
_MOST_CHARACTERS = 200


def shape_words(batch: Any) -> str:
    """Shapes and types of the tensors of a batch, such as `(8,1024)int64`; other parts by their type."""
    return "+".join(_words(part) for part in _parts(batch)[:_MOST_PARTS])[:_MOST_CHARACTERS]


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [part for value in batch.values() for part in _parts(value)]
    if isinstance(batch, (list, tuple)):
        return [part for value in batch[:_MOST_PARTS] for part in _parts(value)]
    return [batch]


def _words(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"({','.join(map(str, part.shape))}){str(part.dtype).removeprefix('torch.')}"
    return type(part).__name__
