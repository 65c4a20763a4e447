"""Who has mirrors is worked out from what all members say: who needs one, and whether the copies still fit."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from test_fabric import World

from keepstep.records.domain_messages import StateKept
from keepstep.records.mirror_messages import AskMirrors, Mirrors, PlaceMirror
from keepstep.training.fabric import Fabric
from keepstep.training.host_memory import Block
from keepstep.training.mirror_plan import VERSIONS, MirrorPlan, Share, plan_of, votes_of
from keepstep.training.mirrors import MemberMirrors
from keepstep.training.state import TrackedState

MB = 1 << 20


def plan(shares: Mapping[int, Share], *, wanted: bool = False) -> MirrorPlan:
    """What members by rank come to when each votes."""
    votes = [votes_of(share, at, world=len(shares), wanted=wanted) for at, share in enumerate(shares.values())]
    return plan_of(tuple(map(min, zip(*votes, strict=True))), tuple(shares))


def test_the_members_of_one_node_take_from_the_same_memory() -> None:
    shares = {
        4: Share("a", "n", 15 * MB, 7, 0, 121 * MB),
        6: Share("b", "n", 20 * MB, 7, 10 * MB, 120 * MB),
        7: Share("b", "m", 10 * MB, 4, 0, 100 * MB),
    }
    assert plan(shares) == MirrorPlan(frozenset({4}), room=True)
    assert plan({**shares, 6: Share("b", "n", 21 * MB, 7, 10 * MB, 120 * MB)}) == MirrorPlan(frozenset({4}), room=False)
    assert plan({**shares, 7: Share("b", "m", 10 * MB, 4, 0, 99 * MB)}) == MirrorPlan(frozenset({4}), room=False)


@pytest.mark.parametrize(("holder", "free"), [(1, 404), (-1, 4)])
def test_who_holds_a_larger_state_than_its_own_needs_room_for_that(holder: int, free: int) -> None:
    """As long as a member does not know its holder, the room is looked for with itself."""
    large = Share("large", "n", 100 * MB, holder, 0, 1000 * MB)
    assert plan({0: large, 1: Share("small", "m", MB, 0, 0, free * MB)}).active
    assert not plan({0: large, 1: Share("small", "m", MB, 0, 0, free * MB - 1)}).active


def test_where_the_script_asks_all_have_one_whatever_is_free() -> None:
    shares = {0: Share("a", "n", MB, 1, 0, 0), 1: Share("a", "m", 1 << 50, 0, 0, 1 << 60)}
    assert plan(shares) == MirrorPlan(frozenset(), room=False)
    assert plan(shares, wanted=True) == MirrorPlan(frozenset({0, 1}), room=True)


def test_a_member_that_has_its_copies_takes_no_more() -> None:
    full = Share("a", "n", MB, 1, 4 * MB, 0)
    assert plan({0: full, 1: Share("b", "m", MB, 0, 4 * MB, 0)}) == MirrorPlan(frozenset({0, 1}), room=True)
    assert not plan({0: full, 1: Share("b", "n", MB, 0, 4 * MB - 1, 0)}).active


class Trained:
    """A member with a state that nobody else has, without a training loop."""

    def __init__(self, fabric: Fabric, *, holder: int) -> None:
        self.said: list[object] = []
        link = SimpleNamespace(place=PlaceMirror(1, fabric.generation, holder), say=self.said.append)
        self.fabric = fabric
        self.tracked = TrackedState(torch.nn.Linear(1024, 2048), role=f"part {fabric.rank}")
        self.mirrors = MemberMirrors(fabric, link)  # type: ignore[arg-type]

    def step(self, version: int) -> None:
        self.mirrors.boundary(version, self.tracked, own=b"own")
        self.mirrors.settle()
        assert self.fabric.agreement()

    def shows(self) -> Mirrors:
        self.mirrors.show(AskMirrors(1, self.fabric.generation + 1, (0, 1)), streams=[])
        answer = self.said[-1]
        assert isinstance(answer, Mirrors)
        return answer

    def mirrored(self) -> list[bool]:
        return [fact.mirrored for fact in self.said if isinstance(fact, StateKept)]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free on every node, last item."""
    bytes_free = [1 << 40]
    monkeypatch.setattr("keepstep.training.mirrors.free_bytes", lambda: bytes_free[-1])
    return bytes_free


class Job(World):
    """Two members on two nodes, each of which holds the other's mirror."""

    def __init__(self) -> None:
        super().__init__("ab")
        self.trained = [Trained(fabric, holder=1 - fabric.rank) for fabric in self.fabrics]

    def train(self, first: int) -> int:
        """Step after step from version `first` on, until two versions are stored, or none is made; gives the last."""
        for version in range(first, first + 1000):
            self.everywhere(lambda fabric, version=version: self.trained[fabric.rank].step(version))
            if self.fabrics[0].ballot.least("mirrored") > first or not self.trained[0].mirrored()[-1]:
                return version
        raise AssertionError("no mirror is stored")

    def close(self) -> None:
        for one in self.trained:
            one.mirrors.close()
        super().close()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def test_what_the_copies_have_taken_already_does_not_count_as_taken(job: Job, free: list[int]) -> None:
    """They took more than a third of what was free: after a change of members they are not too large for the rest."""
    taken = 2 * VERSIONS * job.trained[0].tracked.layout().nbytes
    free.append(5 * taken // 2)
    version = job.train(1)
    free.append(free[-1] - taken)
    job.install(2)
    for one in job.trained:
        one.mirrors.run_on(version)
    job.train(version)
    assert [one.mirrored() for one in job.trained] == [[True, True]] * 2


def test_a_member_that_comes_new_needs_room_and_nobody_goes_back_to_old_copies(job: Job, free: list[int]) -> None:
    version = job.train(1)
    old = job.replace(1, "b", 2)
    gone, job.trained[1] = job.trained[1], Trained(job.fabrics[1], holder=0)
    job.fabrics[0].poison()
    free.append(0)
    job.install(2)
    job.trained[0].mirrors.run_on(version)
    job.train(version)
    assert job.trained[0].mirrored() == [True, False]
    shown = job.trained[0].shows()
    assert (shown.own, shown.held) == ((), ())
    gone.mirrors.close()
    old.close()


def test_mirrors_that_the_script_ends_are_not_gone_back_to(job: Job) -> None:
    version = job.train(1)
    job.trained[0].mirrors.wanted = False
    assert job.trained[1].shows().own
    first = job.trained[0]
    first.mirrors.boundary(version + 1, first.tracked, own=b"own")
    shown = job.trained[0].shows()
    assert (shown.own, shown.held) == ((), ())
    assert first.mirrors.oldest is None


@pytest.mark.parametrize("where", ["own", "held"])
def test_training_goes_on_without_mirrors_where_memory_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Told once; all members stop alike, and begin again in the next generation."""
    short = job.trained[0].mirrors
    shelf = short._own if where == "own" else short._holder.shelf

    def refuse(rank: int, nbytes: int) -> Block:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(shelf, "room", refuse)
        for version in range(1, 1000):
            job.everywhere(lambda fabric, version=version: job.trained[fabric.rank].step(version))
            if all(one.mirrored()[-1:] == [False] for one in job.trained):
                break
        for one in job.trained:
            assert one.mirrored() == [True, False] and one.mirrors.oldest is None
    told = [line.getMessage() for line in caplog.records if "no mirrors" in line.getMessage()]
    assert len(told) == 1 and told[0].startswith("no mirrors: 8 MB for a copy are refused here")
    job.install(2)
    for one in job.trained:
        one.mirrors.run_on(version)
    job.train(version + 1)
    assert all(one.mirrored() == [True, False, True] for one in job.trained)
