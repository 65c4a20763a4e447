"""A small GPT that reads bytes, and the text it learns: the sources of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["GPT", "Shape", "Text", "standard_library"]


class Shape(NamedTuple):
    """Sizes of the network. The defaults make 4.8 million parameters."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    block: int = 64
    dropout: float = 0.1


class Block(nn.Module):
    """Attention to earlier bytes, then a two-layer network; both added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.join_heads = nn.Linear(shape.width, shape.width, bias=False)
        self.before_network = nn.LayerNorm(shape.width)
        self.network = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        return x + self.dropout(self.network(self.before_network(x)))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.join_heads(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Predicts every next byte; `forward(inputs, targets)` is the mean cross entropy in nats a byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, shape.width)
        self.places = nn.Embedding(shape.block, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)
        self.apply(start_small)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1]))
        logits = functional.linear(self.last(self.blocks(x)), self.bytes.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def start_small(module: nn.Module) -> None:
    """GPT-2's initial weights: normal with standard deviation 0.02."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of `block` bytes with the same pieces one byte later as targets."""

    def __init__(self, data: bytes, *, block: int) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.block = block

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.data[index * self.block : (index + 1) * self.block + 1].long()
        return piece[:-1], piece[1:]


def standard_library(limit: int = 2_000_000) -> bytes:
    """The first `limit` bytes of the standard library's own modules, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])
