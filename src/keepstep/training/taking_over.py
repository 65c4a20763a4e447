"""A joiner of a planned move: it follows the leaver while that still trains, and takes its rank at the boundary."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from torch.optim import Optimizer

from keepstep.control.member_moves import may_take_over, take_over
from keepstep.errors import KeepstepError, MembershipError, StateError, TransportError
from keepstep.records.messages import PeerLostReport
from keepstep.records.move_messages import MovePrepared, MoveTaken, PrepareMove
from keepstep.training import private
from keepstep.training.agent_link import AgentLink
from keepstep.training.fabric import Fabric
from keepstep.training.following import Broken, Event, Follower, SnapshotHere, UpdateHere, WantsRoom
from keepstep.training.followwire import FinalDigest, HandedOver, NothingToFollow
from keepstep.training.seat import Seat
from keepstep.training.sharding import local_of
from keepstep.training.state import TrackedState
from keepstep.training.transfer import SourcesLost, fetch
from keepstep.training.turning import MoveVote
from keepstep.training.updates import make_update, room

__all__ = ["TakingOver"]

_log = logging.getLogger("keepstep")
_DIAL_TIMEOUT_S = 10.0
_EXIT_CANNOT_TAKE = 75


class TakingOver:
    """What a joiner knows of the move it is for. `begin` and `stop` may be called from any thread."""

    def __init__(self, seat: Seat, fabric: Fabric, *, link: AgentLink, now: Callable[[], float]) -> None:
        self._seat, self._fabric, self._link = seat, fabric, link
        self._now = now
        self._order: PrepareMove | None = None
        self._follower: Follower | None = None
        self._checking: socket.socket | None = None
        self._last: HandedOver | None = None
        self._said = False
        self._version = -1
        self._moved = 0
        self._own_digest = ""
        self._since = 0.0
        self._parts: dict[str, float] = {}

    def begin(self, order: PrepareMove) -> None:
        """Prepare for this move; the work is done in `work`."""
        self._order = order
        self._link.wake()

    def stop(self) -> None:
        """The move is off."""
        order, self._order = self._order, None
        if order is not None:
            self._link.wake()

    def work(self) -> None:
        """In the training thread: go on as far as what is here allows. Once an `Abort` is answered, nothing is.

        Raises SystemExit in a process that said it was prepared and cannot take the rank after all.
        """
        order = self._order
        if order is None or not may_take_over(self._seat.state):
            self._close()
            return
        if self._follower is None and not self._said:
            self._connect(order)
        while self._follower is not None and self._order is order and (event := self._follower.take()) is not None:
            self._handle(event, order)

    # ------------------------------------------------------------------ inside

    def _connect(self, order: PrepareMove) -> None:
        assert order.leaver is not None
        try:
            self._seat.check_rehearsal()
            sock = self._fabric.dial(order.leaver, "follow", timeout_s=_DIAL_TIMEOUT_S)
            self._checking = self._fabric.dial(order.leaver, "state", timeout_s=_DIAL_TIMEOUT_S)
        except StateError as error:
            self._prepared(order, why=str(error))
            return
        except (TransportError, MembershipError, OSError) as error:
            self._prepared(order, why=f"the leaver was not reached: {error}")
            return
        sizes = [local_of(p).numel() * local_of(p).element_size() for p in self._parameters()]
        self._follower = Follower(sock, order.number, most=room(sizes), wake=self._link.wake)

    def _handle(self, event: Event, order: PrepareMove) -> None:
        try:
            self._make(event, order)
        except (KeepstepError, RuntimeError, ValueError, TypeError, KeyError) as error:
            self._give_up(order, str(error))

    def _make(self, event: Event, order: PrepareMove) -> None:
        if isinstance(event, WantsRoom):
            assert self._follower is not None
            self._follower.fill(self._tracked().adopt(event.manifest))
        elif isinstance(event, SnapshotHere):
            self._tracked().adopted()
            self._version = event.version
            self._moved += event.nbytes
            self._lag(order, event.behind)
        elif isinstance(event, UpdateHere):
            self._update(event)
            self._lag(order, event.head.behind)
        elif isinstance(event, NothingToFollow):
            _log.info("move %d: the state is copied at the end: %s", order.number, event.why)
            self._prepared(order)
        elif isinstance(event, HandedOver):
            self._handed_over(event)
        elif isinstance(event, FinalDigest):
            self._check(event.digest, order)
        elif isinstance(event, Broken):
            self._leaver_lost(order, event.why)

    def _update(self, event: UpdateHere) -> None:
        """The leaver's update, made here. One that does not follow the last is left out: the check finds it."""
        begun = self._now()
        (optimizer,) = self._tracked().optimizers.values()
        self._seat.agreed = True  # the update is not this member's own: nothing is agreed about
        if event.head.version == self._version + 1:
            if event.head.groups:
                make_update(optimizer, groups=event.head.groups, sizes=event.head.sizes, gradients=event.gradients)
            self._version += 1
        self._moved += len(event.gradients)
        if self._follower is not None:
            self._follower.give_back(event.gradients)
        self._parts["last_update_s"] = self._now() - begun

    def _lag(self, order: PrepareMove, behind: int) -> None:
        if behind <= 1:
            self._prepared(order)

    def _prepared(self, order: PrepareMove, *, why: str = "") -> None:
        """Said once, and again if something goes wrong, which counts for nothing from the order to commit on."""
        if why or not self._said:
            self._said = True
            self._link.say(MovePrepared(order.number, bytes_moved=self._moved, why=why))

    def _give_up(self, order: PrepareMove, why: str) -> None:
        """This process cannot take the rank. Where it has said that it can, all may stand and wait for it: it ends, so
        that its loss is seen at once and the leaver keeps the rank."""
        promised = self._said
        self._close()
        self._prepared(order, why=why)
        if promised:
            _log.error("this process ends: it cannot take rank %d in move %d: %s", self._rank, order.number, why)
            raise SystemExit(_EXIT_CANNOT_TAKE)
        _log.warning("move %d: %s", order.number, why)

    def _leaver_lost(self, order: PrepareMove, why: str) -> None:
        """Nothing comes from the leaver any more: its link is reported as broken if it may have committed."""
        promised = self._said
        self._close()
        self._prepared(order, why=why)
        if promised:
            generation = self._fabric.generation if self._last is None else self._last.generation
            self._link.say(PeerLostReport(generation, self._rank))

    def _handed_over(self, last: HandedOver) -> None:
        self._last, self._since = last, self._now()
        self._own_digest = self._tracked().image().digest if self._version == last.version else ""

    def _check(self, digest: str, order: PrepareMove) -> None:
        """Everything must be as the leaver has it; what is not is copied."""
        last = self._last
        if last is None:
            return
        moved = 0
        self._parts["check_s"] = begun = self._now()
        self._parts["check_s"] -= self._since
        if self._own_digest != digest:
            moved = self._copy(digest, order)
            if moved < 0:
                return
        self._parts.update(copy_s=self._now() - begun, bytes=float(moved), vote_s=last.vote_s)
        self._take(last, order)

    def _copy(self, digest: str, order: PrepareMove) -> int:
        """The bytes that differed; -1 where the leaver gives none: then this member is a joiner without state."""
        tracked, sock = self._tracked(), self._checking
        assert sock is not None and order.leaver is not None
        try:
            if not tracked.taking:
                tracked.adopt(tracked.layout())  # what is here counts: only chunks that differ are moved
            return fetch({self._rank: sock}, digest, state=tracked).bytes_moved
        except SourcesLost as error:
            _log.warning("move %d: %s", order.number, error)
            self._leaver_lost(order, str(error))
            return -1

    def _take(self, last: HandedOver, order: PrepareMove) -> None:
        begun = self._now()
        tracked = self._tracked()
        private.apply(last.private, self._seat.streams, extras=tracked.extras, buffers=tracked.own_buffers)
        self._parts["own_state_s"], begun = self._now() - begun, self._now()
        self._tracked().gradient_buckets.form()
        self._tracked().gradient_buckets.take(last.buckets)
        vote = MoveVote(last.number, last.generation, frozenset(order.ranks), ())
        self._fabric.install_move(vote, roster=order.roster)
        self._parts["install_s"] = self._now() - begun
        self._seat.replicas = dict(last.replicas)
        taken = MoveTaken(last.number, last.version, dict(self._parts))
        self._seat.state, say = take_over(self._seat.state, taken, last.generation)
        self._link.say(say.fact)  # type: ignore[arg-type]
        self._seat.publish(last.version, counting=False)
        self._order = None
        self._close()

    def _close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()
        if self._checking is not None:
            self._checking.close()
            self._checking = None

    @property
    def _rank(self) -> int:
        return self._seat.state.rank

    def _tracked(self) -> TrackedState:
        assert self._seat.tracked is not None
        return self._seat.tracked

    def _parameters(self) -> list[object]:
        optimizers: list[Optimizer] = list(self._tracked().optimizers.values())
        return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
