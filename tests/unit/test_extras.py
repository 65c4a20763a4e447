"""Extra objects are each rank's own: a joiner gets those of the lost rank, not those of its source (G-2, G-13)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_fabric import World
from torch import nn

from keepstep.errors import StateError, TornRecord, UsageError
from keepstep.training import private
from keepstep.training.alike import Alike, differing
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.extras import OWN_BYTES
from keepstep.training.manifest import decode_manifest
from keepstep.training.state import TrackedState


class Values:
    """Any object with state."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


def adopt_replica(state: TrackedState, source: TrackedState) -> None:
    """What a joiner does with the state of a replica."""
    image = source.image()
    views = state.adopt(decode_manifest(image.manifest.encode()))
    for view, buffer in zip(views, image.buffers, strict=True):
        view[:] = buffer
    state.adopted()


class Member:
    """One of two replicas that tracks `noise`, its own, and `seen`, which all count alike."""

    def __init__(self, noise: Any) -> None:
        torch.manual_seed(0)
        self.noise, self.seen = Values(draws=noise), Values(count=0)
        self.state = TrackedState(nn.Linear(2, 2), extra={"noise": self.noise, "seen": self.seen})

    def capture(self, version: int, *, counting: bool = False, most: int | None = None) -> bytes:
        return private.capture(version=version, counting=counting, extras=self.state.extras, most=most)

    def take(self, source: TrackedState, own: bytes) -> None:
        """What a joiner does: the state from a replica, the rest from what the lost rank left."""
        adopt_replica(self.state, source)
        private.apply(own, extras=self.state.extras)

    @property
    def has(self) -> tuple[Any, int]:
        return self.noise.values["draws"], self.seen.values["count"]


def tensor(seed: int, *, nbytes: int = 5056) -> torch.Tensor:
    return torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_a_joiner_gets_the_values_of_the_lost_rank() -> None:
    stayer, lost, joiner = Member(tensor(0)), Member(tensor(1)), Member(tensor(2))
    stayer.seen.values["count"] = lost.seen.values["count"] = 7
    assert stayer.state.digest() == lost.state.digest()
    joiner.take(stayer.state, lost.capture(7))
    assert torch.equal(joiner.has[0], tensor(1)) and joiner.has[1] == 7


def test_what_is_counted_behind_the_agreement_comes_from_a_replica_that_was_alike_there() -> None:
    stayer, lost, joiner = Member([0]), Member([1]), Member([2])
    for member in (stayer, lost):
        member.seen.values["count"] = 7
    stayer.capture(8, counting=True)
    own = lost.capture(8, counting=True)
    stayer.noise.values["draws"] = [0, 0]
    stayer.seen.values["count"] = 8  # the lost rank did not come so far
    joiner.take(stayer.state, own)
    assert joiner.has == ([1], 8)
    joiner.take(stayer.state, lost.capture(9, counting=True))  # the stayer knows nothing of that agreement
    assert joiner.has == ([1], 7)


def test_of_one_rank_too_large_to_be_kept_is_an_error_only_where_values_differ() -> None:
    stayer, lost, joiner = Member(tensor(0)), Member(tensor(1)), Member(tensor(2))
    own = lost.capture(3, most=12_000)
    assert len(own) < 12_000
    with pytest.raises(StateError, match=r"the extra.noise of this rank is lost"):
        joiner.take(stayer.state, own)
    joiner.take(Member(tensor(1)).state, own)
    assert torch.equal(joiner.has[0], tensor(1))


def test_what_has_grown_large_is_shared_again() -> None:
    stayer, other = Member(tensor(0)), Member(tensor(1))
    stayer.noise.values["draws"] = torch.arange(100_000)
    assert stayer.state.digest() != other.state.digest()
    other.take(stayer.state, stayer.capture(1))
    assert torch.equal(other.has[0], torch.arange(100_000))
    assert stayer.state.digest() == other.state.digest()


def test_each_rank_finds_its_own_in_a_checkpoint_that_one_of_them_wrote(tmp_path: Path) -> None:
    members = [Member(tensor(rank, nbytes=200_000)) for rank in range(3)]
    replicas = {rank: member.state.replica_key() for rank, member in enumerate(members)}
    for rank, member in enumerate(members):
        writer = CheckpointWriter(tmp_path, rank=rank, world=3)
        writer.save(5, member.state, private=member.capture(5), replicas=replicas)
        writer.close()
    assert [path.name for path in (tmp_path / "step-00000005").glob("*.distcp")] == ["__0_0.distcp"]
    for rank in range(3):
        fresh = Member([])
        own = CheckpointWriter(tmp_path, rank=rank, world=3).load(5, fresh.state)
        private.apply(own, extras=fresh.state.extras)
        assert torch.equal(fresh.has[0], tensor(rank, nbytes=200_000))


@pytest.mark.parametrize(
    "damage",
    [
        lambda own: own.clear(),
        lambda own: own.update(values=3),
        lambda own: own.update(digests={"extra.gone": b"?"}, values={"extra.gone": b"N"}),
    ],
)
def test_foreign_values_are_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    member = Member([1])
    own = member.state.extras.capture(1)
    damage(own)
    with pytest.raises((TornRecord, StateError)):
        member.state.extras.become(own)
    with pytest.raises(TornRecord):
        member.state.extras.take(b"N")


def test_two_replicas_that_differ_are_found_and_members_of_other_parts_may() -> None:
    alike = [1, 2, 5, 5, 9, 9, 3, 4, 6, 6, 8, 8, 1, 2, 5, 5, 9, 9]
    assert differing(alike, (0, 4, 7), what=1) == [] and differing(alike, (0, 4, 7), what=2) == []
    assert differing([*alike[:14], 5, 6, 9, 9], (0, 4, 7), what=1) == [(0, 7)]
    assert differing([*alike[:14], 5, 5, 9, 8], (0, 4, 7), what=2) == [(0, 7)]


@pytest.mark.parametrize("alike", [True, False])
def test_large_objects_that_differ_end_the_job_on_all_members(alike: bool) -> None:
    def train(rank: int, fabric: Any) -> str:
        member = Member(tensor(1 if alike else rank, nbytes=OWN_BYTES + 1))
        check = Alike(fabric)
        try:
            for version in range(3):
                member.capture(version)
                check.boundary(version, member.state)
                assert fabric.agreement()
                check.agreed()
        except UsageError as error:
            return f"{version}: {error}"
        return ""

    with closing(World("aa")) as world:
        said = world.everywhere(lambda fabric: train(fabric.rank, fabric))
    assert said[0] == said[1] and bool(said[0]) != alike
    assert alike or "1: what job.track(extra=...) was given (extra.noise) has other values on rank 1" in str(said[0])


@pytest.mark.parametrize("alike", [True, False])
def test_buffers_that_nobody_makes_alike_and_that_differ_are_told_once(
    caplog: pytest.LogCaptureFixture, alike: bool
) -> None:
    def train(rank: int, fabric: Any) -> bool:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        model[1].get_buffer("running_mean").fill_(0.0 if alike else rank)
        tracked, check = TrackedState(model), Alike(fabric)
        for version in range(5):
            check.boundary(version, tracked)
            assert fabric.agreement()
            check.agreed()
        return True

    with closing(World("aa")) as world:
        world.everywhere(lambda fabric: train(fabric.rank, fabric))
    lines = [one.getMessage() for one in caplog.records if "broadcast_buffers=True" in one.getMessage()]
    assert len(lines) == (0 if alike else 1)
    assert alike or "(model.1.running_mean) has other values on rank 1 than on rank 0" in lines[0]


def test_nothing_is_compared_where_nothing_is_large() -> None:
    asked: list[object] = []
    ballot = SimpleNamespace(add=lambda name, vote: asked.append(vote), least=lambda name: 0)
    check = Alike(SimpleNamespace(generation=0, ballot=ballot, least=asked.append))  # type: ignore[arg-type]
    check.agreed()
    check.boundary(1, Member([1]).state)
    assert len(asked) == 1 and asked[0]() == 0  # type: ignore[operator]
