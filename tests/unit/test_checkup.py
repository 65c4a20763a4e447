"""When a rank hashes its weights, and that it is rare enough."""

from __future__ import annotations

import torch

from keepstep.records.messages import StateDigest
from keepstep.training.checkup import Checkup
from keepstep.training.state import TrackedState


class Costly:
    """A clock on which every second reading, the end of a hash, is `cost_s` later."""

    def __init__(self, cost_s: float) -> None:
        self.now, self.cost_s, self.ends = 0.0, cost_s, False

    def __call__(self) -> float:
        self.now += self.cost_s if self.ends else 0.0
        self.ends = not self.ends
        return self.now


def tracked() -> tuple[TrackedState, torch.nn.Linear]:
    torch.manual_seed(3)
    layer = torch.nn.Linear(4, 4)
    return TrackedState(layer, torch.optim.SGD(layer.parameters(), 0.1)), layer


def versions(cost_s: float, steps: int = 4096) -> list[int]:
    said: list[StateDigest] = []
    clock = Costly(cost_s)
    checkup = Checkup(3, say=said.append, now=clock)
    state, _ = tracked()
    for version in range(1, steps + 1):
        clock.now += 0.1
        checkup.kept(version, state)
    return [fact.version for fact in said]


def test_a_cheap_hash_is_made_every_sixteen_steps():
    assert versions(1e-4, 64) == [16, 32, 48, 64]


def test_a_dear_one_so_rarely_that_it_takes_a_thousandth():
    found = versions(0.02)
    assert 0.02 * (len(found) - 2) <= 1e-3 * 0.1 * 4096 * 1.5
    assert all(version % 256 == 0 for version in found[2:])


def test_equal_weights_have_equal_digests_and_one_bit_tells():
    (one, layer), (two, _) = tracked(), tracked()
    assert one.parameter_digest() == two.parameter_digest()
    with torch.no_grad():
        layer.weight[0, 0] = torch.nextafter(layer.weight[0, 0], torch.tensor(9.0))
    assert one.parameter_digest() != two.parameter_digest()
    assert one.replica_key() == two.replica_key()
