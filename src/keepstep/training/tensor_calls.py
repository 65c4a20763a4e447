"""From tensors to calls of the data plane: addresses, element types, reductions, and what to do afterwards.

The plane reads and writes dense CPU memory. A tensor that is not dense is copied before, and an output copied back
after the call. What lies on a device is the business of `staging.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp

from keepstep.errors import UsageError
from keepstep.training.plane import Call, Element, Reduction

__all__ = ["Prepared", "check_dense", "element_of", "parts", "reduction_of", "rows"]

_Span = tuple[int, int]

_ELEMENTS = {
    torch.uint8: Element.UINT8,
    torch.int8: Element.INT8,
    torch.int16: Element.INT16,
    torch.int32: Element.INT32,
    torch.int64: Element.INT64,
    torch.uint16: Element.UINT16,
    torch.uint32: Element.UINT32,
    torch.uint64: Element.UINT64,
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
    torch.float32: Element.FLOAT32,
    torch.float64: Element.FLOAT64,
    torch.bool: Element.BOOL,
    torch.complex64: Element.COMPLEX64,
    torch.complex128: Element.COMPLEX128,
}
_REDUCTIONS = {
    int(ReduceOp.SUM): Reduction.SUM,
    int(ReduceOp.AVG): Reduction.AVG,
    int(ReduceOp.PRODUCT): Reduction.PRODUCT,
    int(ReduceOp.MIN): Reduction.MIN,
    int(ReduceOp.MAX): Reduction.MAX,
    int(ReduceOp.BAND): Reduction.BAND,
    int(ReduceOp.BOR): Reduction.BOR,
    int(ReduceOp.BXOR): Reduction.BXOR,
}


def reduction_of(operation: ReduceOp) -> Reduction:
    """The plane's reduction for torch's. Raises UsageError for PREMUL_SUM and unknown ones."""
    try:
        return _REDUCTIONS[hash(operation)]  # a ReduceOp hashes to its number; `in` and == are unreliable here
    except KeyError:
        raise UsageError(f"reduction {operation} is not supported", remedy="scale the tensor and use SUM") from None


def element_of(tensor: torch.Tensor, *, reduced: bool) -> Element:
    """The plane's element type. Types that are only moved, not `reduced`, may be anything (plain bytes)."""
    element = _ELEMENTS.get(tensor.dtype)
    if element is None:
        if reduced:
            raise UsageError(f"cannot reduce tensors of {tensor.dtype}", remedy="convert them, e.g. to torch.bfloat16")
        return Element.UINT8
    return element


def check_dense(tensor: torch.Tensor) -> None:
    """Raises UsageError for a tensor without dense data of its own."""
    if isinstance(tensor, FakeTensor):
        raise UsageError(
            "a FakeTensor has no data to communicate",
            remedy="use torch's 'fake' backend for shape propagation, or functional collectives under torch.compile",
        )
    if tensor.layout != torch.strided:
        raise UsageError(f"the keepstep backend takes dense tensors, not {tensor.layout}", remedy="make it dense")


def _check_cpu(tensor: torch.Tensor) -> None:
    """A call whose first tensor is on the CPU has all of them there."""
    if tensor.device.type != "cpu":
        raise UsageError(
            f"a collective of CPU tensors was given one on {tensor.device}", remedy="put all its tensors on one device"
        )


class Prepared:
    """The memory of one call: dense inputs and outputs, kept alive here, and what follows when it is finished."""

    __slots__ = ("_copies", "_integers", "_kept", "from_any", "result", "when_done")

    def __init__(self, result: object) -> None:
        self.result = result
        self.from_any = False
        self.when_done: Callable[[], None] | None = None
        self._kept: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._integers: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> _Span:
        """Address and bytes of the dense data of an input."""
        dense = self._dense(tensor, copy=True)
        self._kept.append(dense)
        return dense.data_ptr(), dense.numel() * dense.element_size()

    def write(self, tensor: torch.Tensor) -> _Span:
        """Address and bytes where the data of an output shall go."""
        dense = self._dense(tensor, copy=False)
        self._output(tensor, dense)
        return dense.data_ptr(), dense.numel() * dense.element_size()

    def update(self, tensor: torch.Tensor) -> _Span:
        """Address and bytes of a tensor that is input and output."""
        dense = self._dense(tensor, copy=True)
        self._output(tensor, dense)
        return dense.data_ptr(), dense.numel() * dense.element_size()

    def start(self) -> None:
        """Gets the inputs ready; nothing to do on the CPU."""

    def await_inputs(self, call: Call) -> None:
        """Waits until the inputs of `call` are there; on the CPU they are."""

    def arrived(self, number: int) -> None:
        """Call `number` of this work is done; said once for each, in order."""

    def join(self) -> None:
        """Lets the caller go on behind what `finish` began; nothing to do on the CPU."""

    def future(self) -> torch.futures.Future[object]:
        """What `get_future` gives."""
        return torch.futures.Future()

    def delivering(self) -> AbstractContextManager[object]:
        """The context in which the future is completed."""
        return nullcontext()

    def finish(self) -> None:
        """Tells `when_done` that the data is there, copies it into outputs that are not dense, lets the memory go."""
        if self.when_done is not None:
            self.when_done()
        if self._copies:
            with torch.no_grad():
                for tensor, dense in self._copies:
                    tensor.copy_(dense)
        self._forget()

    def clamp(self) -> None:
        """The call did not take place: zeroes integer outputs, whatever they hold; other data stays unspecified."""
        with torch.no_grad():
            for tensor in self._integers:
                tensor.zero_()
        self._forget()

    def _dense(self, tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout != torch.strided:
            check_dense(tensor)
            _check_cpu(tensor)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        with torch.no_grad():
            if copy:
                return tensor.resolve_conj().resolve_neg().contiguous()
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _output(self, tensor: torch.Tensor, dense: torch.Tensor) -> None:
        self._kept.append(dense)
        if dense is not tensor:
            self._copies.append((tensor, dense))
        if not (tensor.is_floating_point() or tensor.is_complex()):
            self._integers.append(tensor)

    def _forget(self) -> None:
        self._kept, self._copies, self._integers = [], [], []
        self.when_done = None


def parts(span: _Span, count: int) -> list[_Span]:
    """`span` cut into `count` equal parts. Raises UsageError if that leaves a rest."""
    address, nbytes = span
    size, rest = divmod(nbytes, count)
    if rest:
        raise UsageError(f"{nbytes} bytes cannot be shared equally by {count} ranks")
    return [(address + size * number, size) for number in range(count)]


def rows(span: _Span, tensor: torch.Tensor, *, splits: Sequence[int], count: int) -> list[_Span]:
    """`span` of `tensor` cut along its first dimension by `splits` (empty: into `count` equal parts)."""
    if not splits:
        return parts(span, count)
    first = tensor.shape[0] if tensor.dim() else 1
    if len(splits) != count or sum(splits) != first or min(splits) < 0:
        raise UsageError(f"split sizes {list(splits)} do not fit {first} rows on {count} ranks")
    address, nbytes = span
    row = nbytes // first if first else 0
    spans = []
    for split in splits:
        spans.append((address, split * row))
        address += split * row
    return spans
