"""Tensors as memory for the data plane: what is refused, how parts are cut, what an aborted call leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp

from keepstep.errors import UsageError
from keepstep.training.plane import Element, Reduction
from keepstep.training.tensor_calls import Prepared, element_of, parts, reduction_of, rows


def test_fake_tensors_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(UsageError, match="FakeTensor"):
        Prepared([fake]).read(fake)


@pytest.mark.parametrize("tensor", [torch.ones(3, device="meta"), torch.eye(3).to_sparse()])
def test_other_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="CPU tensors|takes dense"):
        Prepared([tensor]).update(tensor)


def test_an_aborted_call_zeroes_integers_only() -> None:
    floats, integers, flags = torch.ones(3), torch.ones(4, dtype=torch.int64)[::2], torch.ones(2, dtype=torch.bool)
    prepared = Prepared([])
    for tensor in (floats, integers, flags):
        prepared.write(tensor)
    prepared.clamp()
    assert (floats.tolist(), integers.tolist(), flags.tolist()) == ([1.0] * 3, [0, 0], [False, False])


def test_parameters_may_be_outputs() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3).t())
    prepared = Prepared([weight])
    prepared.write(weight)
    prepared.finish()
    assert weight.shape == (3, 2)


def test_conjugated_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    prepared = Prepared([])
    address, nbytes = prepared.read(tensor)
    assert nbytes == 8
    assert address != tensor.data_ptr()


def test_reductions_and_elements() -> None:
    assert reduction_of(ReduceOp(ReduceOp.AVG)) is Reduction.AVG
    assert reduction_of(ReduceOp(ReduceOp.MAX)) is Reduction.MAX
    assert element_of(torch.ones(1, dtype=torch.bfloat16), reduced=True) is Element.BFLOAT16
    odd = torch.ones(1).to(torch.float8_e4m3fn)
    assert element_of(odd, reduced=False) is Element.UINT8
    with pytest.raises(UsageError, match="float8"):
        element_of(odd, reduced=True)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_rows_cover_the_tensor_without_gaps(splits: list[int], width: int) -> None:
    tensor = torch.zeros(sum(splits), width)
    spans = rows((1000, tensor.numel() * 4), tensor, splits=splits, count=len(splits))
    assert [size for _, size in spans] == [split * width * 4 for split in splits]
    assert [address for address, _ in spans] == [1000 + sum(splits[:at]) * width * 4 for at in range(len(splits))]


def test_splits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        rows((0, 24), torch.zeros(6), splits=[1, 2], count=2)
    with pytest.raises(UsageError, match="equally"):
        parts((0, 10), 4)
