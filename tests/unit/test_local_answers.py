"""What a joiner's set-up gets from collectives that nobody else takes part in."""

from __future__ import annotations

import torch

from keepstep.training.local_answers import answer_locally
from keepstep.training.plane import Call, Op
from keepstep.training.tensor_calls import Prepared, parts


def answered(op: Op, inputs: list[torch.Tensor], outputs: list[torch.Tensor], rank: int = 1) -> list[list[float]]:
    prepared = Prepared(outputs)
    call = Call(op=op, inputs=[prepared.read(t) for t in inputs], outputs=[prepared.write(t) for t in outputs])
    answer_locally(call, rank)
    prepared.finish()
    return [tensor.tolist() for tensor in outputs]


def test_all_gather_repeats_the_own_input() -> None:
    outputs = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    assert answered(Op.ALL_GATHER, [torch.tensor([1.0, 2.0])], outputs) == [[1.0, 2.0]] * 3


def test_uneven_parts_are_filled_with_zeros() -> None:
    outputs = [torch.ones(1), torch.ones(3)]
    assert answered(Op.ALL_GATHER, [torch.tensor([4.0, 5.0])], outputs) == [[4.0], [4.0, 5.0, 0.0]]


def test_reduce_scatter_takes_the_own_part() -> None:
    source = torch.arange(6.0)
    prepared = Prepared([output := torch.zeros(2)])
    call = Call(op=Op.REDUCE_SCATTER, inputs=parts(prepared.read(source), 3), outputs=[prepared.write(output)])
    answer_locally(call, 2)
    assert output.tolist() == [4.0, 5.0]


def test_all_reduce_and_broadcast_leave_the_data() -> None:
    tensor = torch.tensor([3.0])
    prepared = Prepared([tensor])
    span = prepared.update(tensor)
    answer_locally(Call(op=Op.ALL_REDUCE, inputs=[span], outputs=[span]), 0)
    answer_locally(Call(op=Op.BROADCAST, root=1, outputs=[span]), 0)
    assert tensor.tolist() == [3.0]


def test_all_to_all_copies_where_sizes_allow() -> None:
    inputs, outputs = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])], [torch.ones(1), torch.ones(1)]
    assert answered(Op.ALL_TO_ALL, inputs, outputs) == [[1.0], [2.0]]


def test_a_receive_gives_zeros() -> None:
    assert answered(Op.RECV, [], [torch.ones(3)]) == [[0.0] * 3]


def test_strided_outputs_are_written_back() -> None:
    output = torch.zeros(2, 3).t()
    prepared = Prepared([output])
    call = Call(op=Op.ALL_GATHER, inputs=[prepared.read(torch.ones(3, 2))], outputs=[prepared.write(output)])
    answer_locally(call, 0)
    prepared.finish()
    assert output.tolist() == [[1.0, 1.0]] * 3
