"""Tensors as bytes: views on the memory of a tensor, without a copy where that is possible."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["head_of", "memory_of", "plain", "viewable"]


def plain(tensor: torch.Tensor) -> str:
    """Why the tensor cannot be carried; empty for dense tensors that hold their own data."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a tensor of type {type(tensor).__module__}.{type(tensor).__qualname__} cannot be carried"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be carried"
    if tensor.device.type == "meta":
        return "a tensor without data (device meta) cannot be carried"
    if tensor.is_quantized:
        return "a quantized tensor cannot be carried"
    return ""


def viewable(tensor: torch.Tensor) -> bool:
    """True where the bytes of `tensor` lie in host memory in the order of its elements."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A writable view on the bytes of a viewable tensor, which lives as long as the view does."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def head_of(address: int, nbytes: int) -> bytes:
    """A copy of the `nbytes` bytes at `address`, which must be there."""
    return ctypes.string_at(address, nbytes) if nbytes > 0 else b""
