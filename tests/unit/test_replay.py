"""Collectives answered from a recording."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from keepstep.records.step_recording import RecordedCall
from keepstep.training.plane import Call, Element, Op
from keepstep.training.replay import Replay, objects_are_none
from keepstep.training.tensor_calls import Prepared


def taped(op: Op, *values: torch.Tensor, element: Element = Element.INT64, peer: int = 0, keep: int = 1 << 20):
    raw = [value.numpy().tobytes() for value in values]
    return RecordedCall("0", op, element, peer, 0, tuple(map(len, raw)), tuple(one[:keep] for one in raw))


def replayed(replay: Replay, op: Op, *outputs: torch.Tensor, element: Element = Element.INT64, inputs=(), peer=-1):
    prepared = Prepared(list(outputs))
    call = Call(op=op, element=element, peer=peer, inputs=[prepared.read(one) for one in inputs])
    call.outputs = [prepared.write(one) for one in outputs]
    replay.answer(call, group="0", rank=1)
    return [one.tolist() for one in outputs]


def test_sizes_that_others_sent_come_again_in_order() -> None:
    replay = Replay([taped(Op.ALL_TO_ALL, torch.tensor([3, 5])), taped(Op.ALL_TO_ALL, torch.tensor([4, 4]))])
    out = torch.zeros(2, dtype=torch.int64)
    assert replayed(replay, Op.ALL_TO_ALL, out, inputs=[torch.tensor([1, 7])]) == [[3, 5]]
    assert replayed(replay, Op.ALL_TO_ALL, out, inputs=[torch.tensor([1, 7])]) == [[4, 4]]
    assert replayed(replay, Op.ALL_TO_ALL, out, inputs=[torch.tensor([1, 7])]) == [[3, 5]], "from the beginning again"
    assert (replay.answered, replay.guessed) == (3, 0)


def test_an_output_of_another_size_is_filled_with_what_there_is() -> None:
    replay = Replay([taped(Op.ALL_TO_ALL, torch.tensor([1.5, 2.5]), element=Element.FLOAT32)])
    out = torch.zeros(5)
    assert replayed(replay, Op.ALL_TO_ALL, out, element=Element.FLOAT32) == [[1.5, 2.5, 1.5, 2.5, 1.5]]


def test_a_message_kept_in_part_is_repeated() -> None:
    value = torch.arange(1.0, 9.0)
    replay = Replay([taped(Op.RECV, value, element=Element.FLOAT32, peer=2, keep=8)])
    assert replayed(replay, Op.RECV, torch.zeros(8), element=Element.FLOAT32, peer=2) == [[1.0, 2.0] * 4]


def test_a_reduction_that_was_not_kept_is_answered_alone() -> None:
    replay = Replay([taped(Op.ALL_REDUCE, torch.ones(4), element=Element.FLOAT32, keep=0)])
    value = torch.full((4,), 7.0)
    assert replayed(replay, Op.ALL_REDUCE, value, element=Element.FLOAT32, inputs=[value]) == [[7.0] * 4]
    assert replay.guessed == 1


def test_sends_and_barriers_do_nothing() -> None:
    replay = Replay([])
    for op in (Op.SEND, Op.BARRIER):
        replay.answer(Call(op=op), group="0", rank=0)
    assert (replay.answered, replay.guessed) == (0, 0)


@pytest.mark.parametrize("garbage", [-5, 1 << 45])
def test_sizes_that_nobody_sent_are_no_garbage(garbage: int) -> None:
    assert replayed(Replay(), Op.BROADCAST, torch.tensor([garbage, 3])) == [[0, 0]]


def test_objects_of_others_are_none_and_nothing_of_them_is_read() -> None:
    """G-17: a payload that another member would have sent never reaches torch's unpickler; the own one does."""
    payload, size = c10d._object_to_tensor({"own": 1}, torch.device("cpu"), None)
    replay = Replay([])
    with objects_are_none(replay, applies=lambda: True):
        assert c10d._tensor_to_object(payload, int(size), None) == {"own": 1}
        replayed(replay, Op.BROADCAST, payload, element=Element.UINT8)
        assert c10d._tensor_to_object(payload, int(size), None) is None
        assert c10d._tensor_to_object(payload[:0], 0, None) is None
    assert c10d._tensor_to_object(payload, int(size), None) == {"own": 1}


def test_what_one_rank_got_is_not_told_to_another_while_it_is_set_up() -> None:
    """Its values would stay. In the step behind, which is overwritten, their sizes are worth having."""
    calls = [
        taped(Op.SCATTER, torch.tensor([3])),
        taped(Op.RECV, torch.tensor([3]), peer=0),
        taped(Op.ALL_TO_ALL, torch.tensor([3])),
        taped(Op.REDUCE_SCATTER, torch.tensor([3])),
        taped(Op.ALL_REDUCE, torch.tensor([3])),
    ]
    replay, value = Replay(calls, own=False), torch.tensor([1])
    assert replayed(replay, Op.SCATTER, torch.tensor([1])) == [[0]]
    assert replayed(replay, Op.RECV, torch.tensor([1]), peer=0) == [[0]]
    assert replayed(replay, Op.ALL_TO_ALL, torch.tensor([0]), inputs=[value]) == [[1]]
    assert replayed(replay, Op.REDUCE_SCATTER, torch.tensor([0]), inputs=[value, torch.tensor([2])]) == [[2]]
    assert replayed(replay, Op.ALL_REDUCE, torch.tensor([1]), inputs=[value]) == [[3]], "which all of them got"
    assert (replay.answered, replay.guessed) == (1, 4)
    replay.end_set_up(1)
    assert replayed(replay, Op.SCATTER, torch.tensor([1])) == [[3]]
    assert replayed(Replay(calls), Op.SCATTER, torch.tensor([1])) == [[3]]


def test_guesses_of_the_set_up_are_told_once_with_their_lines(caplog: pytest.LogCaptureFixture) -> None:
    """G-2: what it does not hold for is not silent. What torch's wrappers move is state that is taken anyway."""
    replay = Replay([taped(Op.ALL_REDUCE, torch.tensor([3]))])
    assert replayed(replay, Op.ALL_REDUCE, torch.tensor([1]), inputs=[torch.tensor([1])]) == [[3]]
    asked = Call(op=Op.BROADCAST, element=Element.INT64, outputs=[Prepared([]).write(value := torch.tensor([1]))])
    asks = compile("replay.answer(asked, group='0', rank=1)", torch.nn.parallel.distributed.__file__, "exec")
    exec(asks, {"replay": replay, "asked": asked})
    assert value.tolist() == [1] and replay.guessed == 1
    replay.answer(Call(op=Op.GATHER), group="0", rank=1)
    replay.end_set_up(3)
    assert not caplog.records
    replay = Replay()
    for _ in range(2):
        replayed(replay, Op.ALL_REDUCE, torch.tensor([1]), inputs=[torch.tensor([1])])
    assert replay.guesses is not None and len(replay.guesses.calls) == 1
    replay.end_set_up(3), replay.end_set_up(3)
    (record,) = caplog.records
    text = record.getMessage()
    assert "rank 3" in text and "all_reduce at " in text and text.count("test_replay.py:") == 1
    replayed(replay, Op.ALL_REDUCE, torch.tensor([1]), inputs=[torch.tensor([1])])
    assert replay.guesses is None
