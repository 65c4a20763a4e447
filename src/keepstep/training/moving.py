"""A planned move inside the training process: what a leaver, a stayer and a joiner do for it, and when.

Orders come in the thread that reads them; what they ask for is built beside training. The training thread comes by
behind each agreement, at each boundary, and, in a joiner, whenever the leaver has sent something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from keepstep.control.member_moves import hand_over, stay
from keepstep.errors import UnsupportedState
from keepstep.records.messages import PathsReady
from keepstep.records.move_messages import (
    AskAddress,
    CancelMove,
    CommitMove,
    MoveOrder,
    MovePrepared,
    MoveRefused,
    PrepareMove,
    TakeAddress,
)
from keepstep.training import private
from keepstep.training.agent_link import AgentLink
from keepstep.training.directory import RosterDirectory
from keepstep.training.fabric import Fabric
from keepstep.training.followwire import HandedOver
from keepstep.training.handover import Handover
from keepstep.training.leading import Leading
from keepstep.training.seat import Seat
from keepstep.training.taking_over import TakingOver
from keepstep.training.turning import Move, MoveVote
from keepstep.training.updates import can_follow

__all__ = ["Moving"]

_log = logging.getLogger("keepstep")


class Moving:
    """All that a member does for moves. `now` is a clock that only goes forward, seconds."""

    def __init__(
        self, seat: Seat, fabric: Fabric, *, link: AgentLink, handover: Handover, now: Callable[[], float]
    ) -> None:
        self._seat, self._fabric, self._link = seat, fabric, link
        self._handover = handover
        self._now = now
        self._leading = Leading(fabric)
        self._joining = TakingOver(seat, fabric, link=link, now=now)
        if isinstance(fabric.directory, RosterDirectory):
            fabric.directory.ask = lambda rank: link.say(AskAddress(rank))
        link.on_move = self.take

    # -------------------------------------------------------------- in the reading thread

    def take(self, order: MoveOrder) -> None:
        """What `order` asks for, beside training."""
        if isinstance(order, PrepareMove):
            self._prepare(order)
        elif isinstance(order, CommitMove):
            self._fabric.turning.commit(order.number, failed=order.failed)
        elif isinstance(order, CancelMove):
            _log.info("move %d is cancelled: %s", order.number, order.why)
            self.drop()
        elif isinstance(order, TakeAddress) and order.generation == self._fabric.generation:
            self._fabric.directory.pass_on(order.rank, order.address)

    def drop(self) -> None:
        """What was prepared for a move is void; from any thread."""
        self._fabric.cancel_move()
        self._leading.stop()
        self._joining.stop()

    def _prepare(self, order: PrepareMove) -> None:
        move = Move(order.number, order.generation, order.ranks, order.part == "leave")
        if order.part == "join":
            self._joining.begin(order)
        elif order.part == "leave":
            self._leading.begin(order.number, self._why_nothing_to_follow(), leavers=len(order.ranks))
            self._fabric.prepare_move(move, ready=lambda why: None)
            self._link.say(MovePrepared(order.number, peers=tuple(sorted(self._fabric.peers()))))
        else:
            self._fabric.prepare_move(move, ready=lambda why: self._link.say(MovePrepared(order.number, why=why)))

    def _why_nothing_to_follow(self) -> str:
        if self._seat.tracked is None:
            return "no state is tracked yet"
        if self._seat.full:
            return "several optimizers, or one that is called with a closure"
        return can_follow(list(self._seat.tracked.optimizers.values()))

    # -------------------------------------------------------------- in the training thread

    def agreed(self, *, updating: bool) -> None:
        """Behind an agreement that has passed, before the update, if one follows: the follower gets it."""
        tracked = self._seat.tracked
        if not self._leading.wants_update or tracked is None:
            return
        if not updating:
            self._leading.skip(self._seat.state.version + 1)
        else:
            (optimizer,) = tracked.optimizers.values()
            self._leading.update(self._seat.state.version + 1, optimizer)

    def boundary(self, *, last: bool) -> None:
        """At a boundary: make the change that is due. The last boundary of a job changes nothing any more."""
        move = self._fabric.turning.move
        if move is not None and move.leaving:
            self._fabric.turning.ready(move.number, yes=self._leading.ready)
            if last and self._fabric.turning.committing:
                self._say_refused(move.number, "the job has made its last step", failed=self._fabric.turning.failed + 1)
        begun = self._now()
        turned = self._fabric.turn(moves=not last)
        if turned.plan:
            self._link.say(PathsReady(turned.plan, installed=True, version=self._seat.state.version))
        if turned.move is not None:
            self._decided(turned.move, self._now() - begun)
        if self._leading.wants_snapshot:
            self._show()

    def work(self) -> None:
        """A joiner: deal with what the leaver has sent."""
        self._joining.work()

    def _show(self) -> None:
        tracked = self._seat.tracked
        assert tracked is not None
        try:
            self._leading.snapshot(self._seat.state.version, tracked.image())
        except UnsupportedState as error:
            _log.warning("the joiner cannot follow: %s", error)
            self._leading.stop()

    def _decided(self, vote: MoveVote, vote_s: float) -> None:
        if not vote.passed:
            self._refused(vote)
        elif self._seat.state.rank in vote.ranks:
            self._leave(vote, vote_s)
        else:
            self._stay(vote)

    def _refused(self, vote: MoveVote) -> None:
        move = self._fabric.turning.move
        if move is not None and move.number == vote.number and move.leaving:
            ranks = ", ".join(map(str, vote.unready)) or "some"
            self._say_refused(vote.number, f"rank {ranks} could not make it", failed=self._fabric.turning.failed)

    def _say_refused(self, number: int, why: str, *, failed: int) -> None:
        self._link.say(MoveRefused(number, self._seat.state.version, why, failed))

    def _stay(self, vote: MoveVote) -> None:
        tracked = self._seat.tracked
        assert tracked is not None
        self._fabric.go_local()
        tracked.gradient_buckets.form()
        self._fabric.install_move(vote)
        self._seat.state = stay(self._seat.state, vote.generation)
        self._leading.stop()

    def _leave(self, vote: MoveVote, vote_s: float) -> None:
        """Say so first; then the rank's own state, and everything again, to be compared."""
        tracked = self._seat.tracked
        assert tracked is not None
        self._fabric.stand_down()
        self._seat.state, say = hand_over(self._seat.state, vote.number, vote.generation)
        self._link.say(say.fact)  # type: ignore[arg-type]
        for stream in self._seat.streams:
            stream.commit()
        version = self._seat.state.version
        own = private.capture(self._seat.streams, version=version, extras=tracked.extras, buffers=tracked.own_buffers)
        tracked.gradient_buckets.form()
        buckets = tracked.gradient_buckets.now()
        last = HandedOver(vote.number, vote.generation, version, own, self._seat.replicas, vote_s, buckets)
        self._leading.hand_over(last)
        self._leading.prove(self._handover.show(tracked).digest)
