"""Drills inside a process: when they begin and end, what they do to calls, batches, links and weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from keepstep.records.messages import Drill, Drilled
from keepstep.training.injected import FlipBit, Mismatch, SlowLinks
from keepstep.training.injection import Injector
from keepstep.training.pace import Pace
from keepstep.training.plane import Call, Element, Op


class Hand:
    """A clock moved by hand; sleeping moves it, too."""

    def __init__(self) -> None:
        self.now = 100.0

    def wall_s(self) -> float:
        return 1e9 + self.now

    def monotonic_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Links:
    """Remembers the limits; sends a thousand bytes for every step that the test counts."""

    def __init__(self) -> None:
        self.limits: dict[int, float | None] = {}
        self.sent = 0

    def limit(self, rank: int, bytes_per_s: float | None) -> None:
        self.limits[rank] = bytes_per_s

    def limited_bytes(self, rank: int) -> int:
        return self.sent


class Rank:
    """One injector with everything around it as a twin."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.clock, self.links, self.told = Hand(), Links(), []
        self.injector = Injector(self.links, clock=self.clock, report=self.told.append, modules=lambda: modules)

    def say(self) -> list[tuple[str, int, bool]]:
        return [(fact.fault, fact.step, fact.ended) for fact in self.told]


def drill(fault: str, step: int = -1, **options) -> Drill:
    return Drill(1, fault, 0, step, **options)


def test_a_pace_waits_in_proportion_to_what_was_computed():
    clock = Hand()
    pace = Pace(clock.monotonic_s, sleep=clock.sleep)
    pace.factor = 1.5
    for _ in range(3):
        clock.now += 2.0
        pace.pause()  # waits one second more
        clock.now += 50.0  # a collective
        pace.resume()
    pace.begin_step()
    assert clock.now == pytest.approx(100 + 3 * (2 + 1 + 50))
    assert pace.step_s == pytest.approx(6.0)


def test_what_was_computed_before_a_batch_is_waited_for_outside_the_loader():
    clock = Hand()
    pace = Pace(clock.monotonic_s, sleep=clock.sleep)
    pace.factor = 3.0
    clock.now += 1.0
    pace.defer()
    assert clock.now == 101.0
    clock.now += 7.0  # the loader
    pace.resume()
    clock.now += 1.0
    pace.pause()
    assert clock.now == pytest.approx(101.0 + 7.0 + 1.0 + 2 * (1.0 + 1.0))
    pace.begin_step()
    assert pace.step_s == pytest.approx(2.0)


def test_nothing_is_measured_before_the_first_drill():
    rank = Rank()
    for step in range(5):
        rank.injector.begin_step(step)
    assert rank.injector.pace is None and rank.told == []
    assert rank.injector.take(iter([7])) == 7


def test_a_drill_waits_for_its_step_and_ends_after_as_many_as_ordered():
    rank = Rank()
    rank.injector.order(drill("slow-compute", 3, steps=2, factor=1.3))
    factors = []
    for step in range(8):
        rank.injector.begin_step(step)
        factors.append(rank.injector.pace.factor if rank.injector.pace else None)
    assert factors == [1.0, 1.0, 1.0, 1.3, 1.3, None, None, None]
    assert rank.say() == [("slow-compute", 3, False), ("slow-compute", 5, True)]
    assert rank.told[0].at > 1e9


def test_a_stop_ends_at_once_what_runs_and_what_waits():
    rank = Rank()
    rank.injector.order(drill("cut-link", peers=(4,)))
    rank.injector.order(drill("cut-link", peers=(5,)))
    rank.injector.order(drill("cut-link", 9, peers=(4,)))
    rank.injector.begin_step(1)
    assert rank.links.limits == {4: 0.0, 5: 0.0}
    rank.injector.order(drill("cut-link", peers=(4,), stop=True))
    assert rank.links.limits == {4: None, 5: 0.0}
    rank.injector.begin_step(9)
    assert rank.say() == [("cut-link", 1, False), ("cut-link", 1, False), ("cut-link", 1, True)]
    rank.injector.order(drill("freeze", stop=True))
    assert rank.told[-1] == Drilled("freeze", 0, 9, rank.clock.wall_s(), ended=True, note="there was none")


def test_the_drill_of_a_node_ends_although_a_rank_has_moved_since():
    rank = Rank()
    rank.injector.order(drill("throttle-node", peers=(2, 3), rate=5.0))
    rank.injector.begin_step(1)
    rank.injector.order(drill("throttle-node", peers=(4,), stop=True))
    assert rank.links.limits == {2: 5.0, 3: 5.0} and rank.told[-1].note == "there was none"
    rank.injector.order(drill("throttle-node", peers=(3,), stop=True))
    assert rank.links.limits == {2: None, 3: None}


def test_a_throttled_link_gets_the_rate_that_makes_a_step_so_much_longer():
    links, clock = Links(), Hand()
    fault = SlowLinks(links, (2,), rate=0.0, factor=1.5, now=clock.monotonic_s)
    for step in range(3):
        assert fault.begin(step) is None and links.limits == {2: -1.0}
        links.sent += 1000
        clock.now += 0.2
    assert "1000 bytes a step" in fault.begin(3)
    assert links.limits == {2: pytest.approx(1000 / 0.1)}
    fault.end()
    assert links.limits == {2: None}


def test_a_link_without_traffic_is_never_called_throttled():
    links, clock = Links(), Hand()
    fault = SlowLinks(links, (2,), rate=0.0, factor=2.0, now=clock.monotonic_s)
    assert [fault.begin(step) for step in range(9)] == [None] * 9


def test_slow_data_needs_a_measured_step():
    rank = Rank()
    rank.injector.order(drill("slow-data", factor=3.0))
    rank.injector.begin_step(0)
    assert rank.told == []
    rank.clock.now += 0.001
    rank.injector.begin_step(1)
    assert rank.say() == [("slow-data", 1, False)] and rank.told[0].note == "2 ms a batch"


def test_the_steps_between_two_drills_are_not_measured():
    rank = Rank()
    rank.injector.order(drill("cut-link", peers=(4,)))
    rank.injector.begin_step(0)
    rank.injector.order(drill("cut-link", peers=(4,), stop=True))
    for step in range(1, 9):
        rank.clock.now += 1.0
        rank.injector.begin_step(step)
    rank.injector.order(drill("slow-data", factor=2.0))
    rank.injector.begin_step(9)
    rank.clock.now += 0.5
    rank.injector.begin_step(10)
    assert rank.told[-1].note == "500 ms a batch"


def test_a_stopped_loader_goes_on_when_the_drill_ends():
    rank = Rank()
    rank.injector.order(drill("stop-data"))
    rank.injector.begin_step(0)
    (stopped,) = [one.fault for one in rank.injector._active]
    assert not stopped._open.is_set()
    rank.injector.order(drill("stop-data", stop=True))
    assert stopped._open.is_set() and rank.injector.take(iter("a")) == "a"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_bit_of_one_weight_is_flipped(dtype):
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2).to(dtype)
    before = layer.weight.detach().clone()
    assert "weight" in FlipBit(lambda: [layer]).begin(0)
    changed = (layer.weight != before).nonzero().tolist()
    assert changed == [[0, 0]] and math.isfinite(float(layer.weight[0, 0]))
    a, b = (
        np.frombuffer(t.detach().contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)
        for t in (before, layer.weight)
    )
    assert int(np.unpackbits(a ^ b).sum()) == 1


def test_a_rank_without_weights_is_not_said_to_be_flipped():
    rank = Rank(torch.nn.ReLU())
    rank.injector.order(drill("flip-bit"))
    rank.injector.begin_step(0)
    assert rank.told == []


def reduce_call(count: int) -> Call:
    return Call(Op.ALL_REDUCE, Element.FLOAT32, inputs=[(4096, 4 * count)], outputs=[(4096, 4 * count)])


def test_how_a_rank_disagrees():
    call = reduce_call(10)
    fault = Mismatch("shape")
    assert fault.altered([call], rank=1) == [call]
    fault.begin(0)
    send = Call(Op.SEND, inputs=[(4096, 8)], peer=1)
    assert fault.altered([send], rank=1) == [send]
    (longer,) = fault.altered([call], rank=1)
    assert longer.op == Op.ALL_REDUCE and longer.inputs == longer.outputs and longer.inputs[0][1] == 44
    assert fault.altered([call], rank=1) == [call]
    for own, given in ((0, "inputs"), (1, "outputs")):
        fault = Mismatch("op")
        fault.begin(0)
        (other,) = fault.altered([call], rank=own)
        assert other.op == Op.BROADCAST and [size for _, size in getattr(other, given)] == [40]
    fault = Mismatch("extra")
    fault.begin(0)
    first, second = fault.altered([call], rank=1)
    assert second is call and first.inputs[0][1] == 4


def test_a_mismatch_is_over_after_its_step():
    rank = Rank()
    rank.injector.order(drill("mismatch", how="op"))
    rank.injector.begin_step(4)
    rank.injector.begin_step(5)
    assert rank.injector.altered([reduce_call(1)], rank=0)[0].op == Op.ALL_REDUCE
    assert rank.say() == [("mismatch", 4, False)] and rank.injector.pace is None
