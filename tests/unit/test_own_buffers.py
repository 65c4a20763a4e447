"""Buffers that replicas have other values in are each rank's own: compared by nobody, and kept for its successor."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from test_extras import adopt_replica
from test_fabric import World
from torch import nn

from keepstep.errors import StateError, TornRecord
from keepstep.records.ring import MAX_PRIVATE_BYTES
from keepstep.training import private
from keepstep.training.alike import Alike
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.extras import OWN_BYTES
from keepstep.training.state import TrackedState

WIDE = OWN_BYTES // 4 + 1


class Member:
    """A replica; the running values of its first BatchNorm are `seen`, and it holds a buffer that all have alike."""

    def __init__(self, seen: float, *, width: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 2), nn.BatchNorm1d(2))
        self.model.register_buffer("mask", torch.ones(3))
        self.model[0].get_buffer("running_mean").fill_(seen)
        self.state = TrackedState(self.model)

    @property
    def seen(self) -> float:
        return float(self.model[0].get_buffer("running_mean")[0])

    def capture(self, *, most: int | None = MAX_PRIVATE_BYTES) -> bytes:
        return private.capture(extras=self.state.extras, buffers=self.state.own_buffers, most=most)

    def take(self, source: TrackedState, own: bytes) -> None:
        """What a joiner does: the state from a replica, the rest from what the lost rank left."""
        adopt_replica(self.state, source)
        private.apply(own, extras=self.state.extras, buffers=self.state.own_buffers)


def trained(seen: list[float], *, width: int = 2) -> list[Member]:
    """Members, rank by rank, behind the comparison of the second step."""
    members = [Member(one, width=width) for one in seen]

    def train(fabric: Any) -> None:
        check = Alike(fabric)
        for version in range(2):
            check.boundary(version, members[fabric.rank].state)
            assert fabric.agreement()
            check.agreed()

    with closing(World("a" * len(seen))) as world:
        world.everywhere(train)
    return members


def digests(members: list[Member]) -> set[str]:
    return {one.state.digest() for one in members}


def test_replicas_are_compared_without_them_and_with_everything_else() -> None:
    """G-13: three replicas of which no two have the same running values are one state; a weight or a mask that is
    another one is still a divergence."""
    members = trained([1.0, 2.0, 3.0])
    assert len(digests(members)) == 1
    for changed in (members[2].model[1].weight.data, members[1].model.get_buffer("mask")):
        before = changed.clone()
        changed.view(torch.int32).view(-1)[0] ^= 1
        assert len(digests(members)) == 2
        changed.copy_(before)
    assert len(digests(members)) == 1


def test_replicas_that_are_alike_keep_all_in_what_is_compared() -> None:
    members = trained([1.0, 1.0])
    members[1].model[0].get_buffer("running_mean").fill_(2.0)
    assert len(digests(members)) == 2


def test_a_joiner_gets_those_of_the_lost_rank() -> None:
    """G-2: and it is a replica like the others, without a comparison of its own."""
    stayer, lost, other = trained([1.0, 2.0, 3.0])
    joiner = Member(9.0)
    joiner.take(stayer.state, lost.capture())
    assert joiner.seen == 2.0 and digests([stayer, other, joiner]) == {stayer.state.digest()}
    third = Member(9.0)
    third.take(joiner.state, other.capture())
    assert third.seen == 3.0


def test_many_go_with_mirrors_and_checkpoints_only() -> None:
    """More than a rank's own state has room for: a joiner has its replica's, or those of the mirror."""
    stayer, lost, _ = trained([1.0, 2.0, 3.0], width=WIDE)
    assert not lost.state.own_buffers.small
    for source, own, seen in ((stayer, lost.capture(), 1.0), (lost, lost.capture(), 2.0)):
        joiner = Member(9.0, width=WIDE)
        joiner.take(source.state, own)
        assert joiner.seen == seen and len(digests([stayer, joiner])) == 1
    assert len(lost.capture(most=None)) > OWN_BYTES


def test_a_state_that_has_them_in_it_makes_them_part_of_what_is_compared() -> None:
    """A copy from before the comparison: whoever goes back to it holds what a joiner holds that takes it."""
    early = Member(1.0)
    stayer, _ = trained([1.0, 2.0])
    stayer.take(early.state, b"")
    assert digests([stayer, early]) == {early.state.digest()}


@pytest.mark.parametrize("width", [2, WIDE])
def test_a_checkpoint_that_one_rank_wrote_gives_each_rank_its_own(tmp_path: Path, width: int) -> None:
    members = trained([1.0, 2.0], width=width)
    replicas = dict(enumerate(one.state.replica_key() for one in members))
    writers = [CheckpointWriter(tmp_path, rank=rank, world=2) for rank in range(2)]
    for member, writer in zip(members, writers, strict=True):
        writer.save(1, member.state, private=member.capture(most=None), replicas=replicas)
        writer.close()
    fresh = [Member(9.0, width=width) for _ in range(2)]
    for member, writer in zip(fresh, writers, strict=True):
        own = writer.load(1, member.state)
        private.apply(own, extras=member.state.extras, buffers=member.state.own_buffers)
    assert [one.seen for one in fresh] == [1.0, 2.0] and digests(fresh) == digests(members[:1])


def test_what_does_not_fit_this_member_is_refused() -> None:
    own = Member(1.0).state.own_buffers
    with pytest.raises(TornRecord):
        own.become({"model.0.running_mean": 1})
    with pytest.raises(StateError, match="not there"):
        own.become({"model.7.running_mean": torch.ones(2)})
