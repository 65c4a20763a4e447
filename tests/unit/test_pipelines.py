"""A joiner prepares its pipeline stage alone; whether a schedule is prepared goes back with a step that is redone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._utils import _TensorMeta

from keepstep.errors import StateError
from keepstep.training import process_group
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Mode, Place, connect_fabric
from keepstep.training.pipelines import Pipelines
from keepstep.training.stage_shapes import StageAsked, StageShapes, shapes_of, tell_shapes, tensors_of

META = _TensorMeta(torch.Size((2, 8)), (8, 1), torch.float32, True)


@pytest.fixture
def members() -> Iterator[list[Fabric]]:
    """Two members of a job; the second one is a joiner, still on its own."""
    doors = [Doors(f"m{rank}", "a") for rank in range(2)]
    roster = {rank: one.address for rank, one in enumerate(doors)}
    fabrics = [
        Fabric(one, Place(rank, 2, 1), secret=b"k" * 32, directory=RosterDirectory(roster), protected=True)
        for rank, one in enumerate(doors)
    ]
    fabrics[1].go_local()
    connect_fabric(fabrics[1])
    process_group.register()
    dist.init_process_group("keepstep", store=dist.HashStore(), rank=1, world_size=2)
    yield fabrics
    dist.destroy_process_group()
    connect_fabric(None)
    for fabric in fabrics:
        fabric.close()


class HeldStage:
    """The part of a pipeline stage that others ask for."""

    num_stages, stage_index = 2, 0

    def __init__(self, metas: tuple[_TensorMeta, ...]) -> None:
        self.group = SimpleNamespace(group_name=dist.group.WORLD.group_name)
        self._stage_meta = SimpleNamespace(outputs=metas, input_grads=None)


def neighbour(fabric: Fabric, metas: tuple[_TensorMeta, ...]) -> Pipelines:
    """What the holder of stage 0 of 2 would know after its first step."""
    pipelines = Pipelines(fabric)
    pipelines.held = HeldStage(metas)  # pipelines themselves hold stages weakly
    pipelines._stages.add(pipelines.held)
    return pipelines


def last_stage() -> tuple[torch.nn.Linear, Schedule1F1B]:
    layer = torch.nn.Linear(8, 8)
    stage = PipelineStage(layer, 1, 2, torch.device("cpu"))
    return layer, Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)


def test_a_joiner_prepares_with_its_neighbours_shapes(members: list[Fabric]) -> None:
    neighbour(members[0], (META,))
    pipelines = Pipelines(members[1])
    layer, schedule = last_stage()
    pipelines.begin_step()
    try:
        schedule.step(target=torch.zeros(8, 8))
    finally:
        pipelines.close()
    assert layer.weight.grad is not None
    pipelines.check()
    assert not pipelines.unprepared
    assert schedule._stage_forward_initialized and schedule._stage_backward_initialized
    assert "_warmup_p2p" not in vars(schedule) and "_recv_meta" not in vars(schedule._stage)


def test_being_prepared_goes_back_with_the_step(members: list[Fabric]) -> None:
    neighbour(members[0], (META,))
    pipelines = Pipelines(members[1])
    _, schedule = last_stage()
    pipelines.begin_step()
    try:
        schedule.step(target=torch.zeros(8, 8))
        pipelines.redo()
        assert not schedule._stage_forward_initialized, "it was prepared in the step that is redone"
        schedule.step(target=torch.zeros(8, 8))
        pipelines.begin_step()
        pipelines.redo()
        assert schedule._stage_forward_initialized, "it was prepared before"
        pipelines.forget()
        assert not schedule._stage_backward_initialized
    finally:
        pipelines.close()


def test_a_neighbour_that_knows_nothing_is_an_error(members: list[Fabric]) -> None:
    Pipelines(members[0])
    pipelines = Pipelines(members[1])
    _, schedule = last_stage()
    pipelines.begin_step()
    try:
        with pytest.raises(StateError, match="does not know its shapes"):
            schedule.step(target=torch.zeros(8, 8))
        with pytest.raises(StateError, match="not prepared: rank 0: .* does not know its shapes"):
            pipelines.check()  # all others have prepared theirs: it could not make a step with them
        assert pipelines.unprepared
        pipelines.forget(again=True)
        assert not pipelines.unprepared
        pipelines.check()  # all prepare anew
    finally:
        pipelines.close()


class Counting(torch.nn.Module):
    """Counts in a buffer how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.layer(x)


def test_a_schedule_that_is_prepared_again_leaves_no_trace(members: list[Fabric]) -> None:
    """Twice, as its first step afterwards is redone."""
    counting = Counting()
    stage = PipelineStage(counting, 0, 1, torch.device("cpu"), group=dist.new_group([1]))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    live = SimpleNamespace(mode=Mode.LIVE, serve=lambda *_: None)
    pipelines = Pipelines(live)  # type: ignore[arg-type]
    made: list[float] = []
    pipelines.begin_step()
    try:
        for again in (False, False, True, False):
            if again:
                pipelines.forget(again=True)
            before = float(counting.calls)
            pipelines.begin_step()
            schedule.step(torch.zeros(8, 8), target=torch.zeros(8, 8))
            if again:
                pipelines.redo()
                assert not schedule._stage_forward_initialized
                counting.calls.fill_(before)
                pipelines.begin_step()
                schedule.step(torch.zeros(8, 8), target=torch.zeros(8, 8))
            made.append(float(counting.calls) - before)
    finally:
        pipelines.close()
    assert made == [5, 4, 4, 4], "one call for the preparation, one for each micro batch"


@pytest.mark.parametrize("redone", [False, True])
def test_a_schedule_that_a_fresh_process_prepares_in_mid_job_leaves_no_trace(
    members: list[Fabric], redone: bool
) -> None:
    """G-2: the job had prepared it in its first step, before the checkpoint from which this process goes on."""
    counting = Counting()
    stage = PipelineStage(counting, 0, 1, torch.device("cpu"), group=dist.new_group([1]))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    pipelines = Pipelines(SimpleNamespace(mode=Mode.LIVE, serve=lambda *_: None))  # type: ignore[arg-type]
    pipelines.run_on(100, anew=False)
    made: list[float] = []
    try:
        if redone:  # before it came to the schedule
            pipelines.begin_step()
            pipelines.redo()
        for _ in range(2):
            pipelines.begin_step()
            before = float(counting.calls)
            schedule.step(torch.zeros(8, 8), target=torch.zeros(8, 8))
            made.append(float(counting.calls) - before)
    finally:
        pipelines.close()
    assert made == [4, 4]


@pytest.mark.parametrize("whole", [False, True])
def test_a_rehearsal_that_failed_before_its_schedule_is_told_before_a_move(members: list[Fabric], whole: bool) -> None:
    """The others have prepared theirs: its first step would wait for them."""
    pipelines = Pipelines(members[1])
    pipelines.begin_step(rehearsing=True)
    pipelines.rehearsed(whole=whole)
    try:
        if whole:  # the script uses no schedule in its steps
            pipelines.check()
        else:
            with pytest.raises(StateError, match="a pipeline schedule is not prepared: its first step failed"):
                pipelines.check()
    finally:
        pipelines.close()


def test_shapes_there_and_back() -> None:
    assert tensors_of(shapes_of((META, None))) == (META, None)
    with pytest.raises(StateError, match="unknown type"):
        tensors_of([SimpleNamespace(dtype="load", sizes=(), strides=(), needs_gradient=False)])
    with pytest.raises(StateError, match="distributed tensors"):
        shapes_of([SimpleNamespace(placements=())])


def test_nonsense_gets_no_answer() -> None:
    """G-17: what does not decode, or is too long, ends the connection."""
    for sent in (b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff", b"\x01"):
        ours, theirs = socket.socketpair()
        told = threading.Thread(target=tell_shapes, args=(theirs, lambda asked: StageShapes()))
        told.start()
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(100) == b""
        told.join()
        ours.close()
    assert StageAsked("g", 2, 0).group == "g"
