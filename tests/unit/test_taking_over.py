"""A joiner that has said it is prepared: it takes its rank, or it is seen at once that it does not (G-22)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from keepstep.control.member import MemberState
from keepstep.errors import StateError
from keepstep.records.address import Address
from keepstep.records.messages import PeerLostReport
from keepstep.records.move_messages import MovePrepared, MoveTaken, PrepareMove
from keepstep.training import private
from keepstep.training.buckets import Bucketing
from keepstep.training.followwire import FinalDigest, HandedOver, NothingToFollow, receive_frame, send_frame
from keepstep.training.state import TrackedState
from keepstep.training.taking_over import TakingOver
from keepstep.training.transfer import StateServer

LEAVER, JOINER = Address("m1", "a", "l", "h", 1), Address("m2", "a", "l", "h", 2)
ORDER = PrepareMove(1, 1, 2, "join", {1: JOINER}, roster={0: LEAVER, 1: JOINER}, leaver=LEAVER)


def tracked(seed: int) -> TrackedState:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 3)
    return TrackedState(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Joiner:
    """A joiner's seat, fabric and line to its agent in one, and the leaver's ends of what it dials."""

    def __init__(self) -> None:
        self.state = MemberState(rank=1, generation=1, joiner=True, answering=1)
        self.streams: list[object] = []
        self.replicas: dict[int, str] = {}
        self.full = self.agreed = False
        self.tracked = tracked(2)
        self.generation = 1
        self.said: list[object] = []
        self.installed: list[int] = []
        self.unfit = ""
        self.leaver = tracked(1)
        self.ends: dict[str, socket.socket] = {}
        self.woken = threading.Semaphore(0)
        self.taking = TakingOver(self, self, link=self, now=lambda: 0.0)  # type: ignore[arg-type]

    # ------------------------------------------------------------ what it is given

    def check_rehearsal(self) -> None:
        if self.unfit:
            raise StateError(self.unfit)

    def publish(self, version: int, *, counting: bool) -> None:
        self.published = version

    def dial(self, address: Address, kind: str, *, timeout_s: float) -> socket.socket:
        assert address == LEAVER
        ours, self.ends[kind] = socket.socketpair()
        return ours

    def install_move(self, vote, *, roster) -> None:
        self.installed.append(vote.generation)

    def say(self, fact: object) -> None:
        self.said.append(fact)

    def wake(self) -> None:
        self.woken.release()

    # ------------------------------------------------------------ what happens

    def hear(self, times: int = 1) -> None:
        """Wait until something has come, and deal with it."""
        for _ in range(times):
            assert self.woken.acquire(timeout=20)
            self.taking.work()

    def promise(self) -> None:
        """Up to its word that it is prepared; its state is to be copied at the end."""
        self.taking.begin(ORDER)
        self.hear()
        receive_frame(self.ends["follow"], most=0)
        send_frame(self.ends["follow"], NothingToFollow("a closure"))
        self.hear()
        assert self.said == [MovePrepared(1)]

    def serve(self) -> None:
        """The leaver shows its state."""
        image = self.leaver.image()
        threading.Thread(target=StateServer(lambda: image).handle, args=(self.ends["state"],), daemon=True).start()

    def hand_over(self, own: bytes, buckets: tuple[Bucketing, ...] = ()) -> None:
        """The vote has passed."""
        send_frame(self.ends["follow"], HandedOver(1, 2, 7, own, {0: "key"}, 0.5, buckets))
        send_frame(self.ends["follow"], FinalDigest(self.leaver.digest()))

    def close(self) -> None:
        self.taking.stop()
        self.taking.work()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def joiner() -> Iterator[Joiner]:
    made = Joiner()
    yield made
    made.close()


def test_it_takes_its_rank(joiner: Joiner) -> None:
    joiner.promise()
    joiner.serve()
    joiner.hand_over(private.capture())
    joiner.hear(2)
    assert isinstance(joiner.said[-1], MoveTaken) and joiner.installed == [2]
    assert joiner.tracked.digest() == joiner.leaver.digest()
    assert (joiner.state.joiner, joiner.state.generation, joiner.published) == (False, 2, 7)


def test_what_it_rehearsed_with_may_rule_it_out(joiner: Joiner) -> None:
    joiner.unfit = "a pipeline schedule is not prepared"
    joiner.taking.begin(ORDER)
    joiner.hear()
    assert joiner.said == [MovePrepared(1, why=joiner.unfit)]
    assert joiner.ends == {}


def test_one_that_cannot_take_its_rank_after_all_ends(joiner: Joiner) -> None:
    """Everybody stands and waits for it; its end is seen at once."""
    joiner.promise()
    joiner.serve()
    joiner.hand_over(private.capture([Stream()]))
    with pytest.raises(SystemExit) as caught:
        joiner.hear(2)
    assert caught.value.code == 75
    assert joiner.installed == []
    assert isinstance(joiner.said[-1], MovePrepared) and "1 data streams" in joiner.said[-1].why


def test_one_that_cannot_have_the_buckets_of_the_others_ends(joiner: Joiner) -> None:
    """Its gradients would be added to those of other parameters."""
    joiner.promise()
    joiner.serve()
    joiner.hand_over(private.capture(), (Bucketing(True, ((1, 0),)),))
    with pytest.raises(SystemExit):
        joiner.hear(2)
    assert joiner.installed == []
    assert isinstance(joiner.said[-1], MovePrepared) and "gradient buckets" in joiner.said[-1].why


class Stream:
    """A data stream of the leaver that the joiner does not have."""

    def position(self, *, counting: bool = False) -> dict[str, object]:
        return {"epoch": 0, "consumed": 0, "now": []}

    def seek(self, position: dict[str, object]) -> None:
        raise AssertionError


def lose_state(joiner: Joiner) -> None:
    joiner.ends["state"].close()
    joiner.hand_over(private.capture())
    joiner.hear(2)


def lose_stream(joiner: Joiner) -> None:
    joiner.ends["follow"].shutdown(socket.SHUT_RDWR)
    joiner.hear()


@pytest.mark.parametrize(("lose", "generation"), [(lose_state, 2), (lose_stream, 1)])
def test_one_whose_leaver_does_not_answer_reports_it(
    joiner: Joiner, lose: Callable[[Joiner], None], generation: int
) -> None:
    joiner.promise()
    lose(joiner)
    assert joiner.said[-1] == PeerLostReport(generation, 1)
    assert joiner.installed == [] and joiner.state.joiner


def test_what_comes_after_an_abort_comes_too_late(joiner: Joiner) -> None:
    """It has said that it holds no state: another may have its rank by now."""
    joiner.promise()
    joiner.serve()
    joiner.state = MemberState(rank=1, generation=1, joiner=True, answering=3)
    joiner.hand_over(private.capture())
    joiner.hear()
    joiner.taking.work()
    assert joiner.said == [MovePrepared(1)] and joiner.installed == []
