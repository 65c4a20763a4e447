"""Copies of this member's state in host memory and in that of another member, made after each step beside training.

All members copy the same versions: a new one is begun when the agreement has shown that the one before is stored
everywhere. So at any time each member has its own copy of the newest version that every mirror has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from keepstep.errors import KeepstepError
from keepstep.records.domain_messages import StateKept
from keepstep.records.messages import Fetched, FetchFailed
from keepstep.records.mirror_messages import AskMirrors, Mirrors, TakeMirror
from keepstep.store.machine_memory import free_bytes
from keepstep.training import private
from keepstep.training.agent_link import AgentLink
from keepstep.training.data import Batches
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.host_memory import copy_bytes
from keepstep.training.mirror_holder import NO_MEMORY, MirrorHolder
from keepstep.training.mirror_plan import VERSIONS, Share, plan_of, votes_of
from keepstep.training.mirror_sender import MirrorSender, PrivateSender
from keepstep.training.mirror_wire import ask_copy
from keepstep.training.shelf import Shelf
from keepstep.training.state import TrackedState
from keepstep.training.state_copy import StateCopy
from keepstep.training.statewire import set_timeout
from keepstep.training.transfer import SourcesLost, fetch

__all__ = ["MemberMirrors"]

_DIAL_TIMEOUT_S = 5.0
_SHORT = -2
"""The vote of a member that got no memory for a copy: nobody makes mirrors any more in this generation."""
_log = logging.getLogger("keepstep")


class MemberMirrors:
    """The mirrors of one member. `wanted`: None where some state has no replica, True always, False never; a copy is
    made every `every` steps. All members must be told the same."""

    def __init__(self, fabric: Fabric, link: AgentLink) -> None:
        self.wanted: bool | None = None
        self.every = 1
        self._fabric = fabric
        self._link = link
        self._own = Shelf()
        self._holder = MirrorHolder(fabric)
        self._sender = MirrorSender(fabric, self._own, place=self._place)
        self._private = PrivateSender(fabric, place=self._place)
        self._generation, self._replica = -1, ""
        self._active = self._sends = self._short = False
        self._last = -1
        self._copy: StateCopy | None = None
        fabric.ballot.add("mirrored", lambda: _SHORT if self._short or self._holder.short else self._sender.stored)

    # ------------------------------------------------------------------ while training goes on

    def tell_private(self, version: int, data: bytes) -> None:
        """Leave what only this rank knows where the loss of this node does not take it."""
        if self.wanted is not False:
            self._private.tell(version, data)

    def boundary(self, version: int, tracked: TrackedState, *, own: bytes) -> None:
        """A step begins: copy the state as it is now, if that is due. `own` is what only this rank knows."""
        if self.wanted is False:
            self._clear()
            return
        if version == 0 or self._fabric.mode is not Mode.LIVE:
            return
        if self._fabric.generation != self._generation and not self._plan(tracked):
            return
        if not self._active or version < self._last + self.every:
            return
        if self._last >= 0:
            stored = self._fabric.ballot.least("mirrored")
            if stored == _SHORT:
                self._stop()
            if stored != self._last:
                return
            self._holder.shelf.drop_older_generations(self._generation)
        self._last = version
        image = tracked.image()
        try:
            block = self._own.room(self._fabric.rank, image.manifest.nbytes)
        except OSError as error:
            self._short = True
            _log.warning(NO_MEMORY, image.manifest.nbytes // 1_000_000, error)
            return
        self._copy = StateCopy(image, block, version=version, private=own)
        self._sender.submit(self._copy, generation=self._generation, send=self._sends)

    def settle(self) -> None:
        """The state is about to change: wait until it is copied."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    @property
    def oldest(self) -> int | None:
        """The oldest version that this member may have to go back to with its own copies."""
        versions = self._own.versions(self._fabric.rank)
        return min((*versions, self._last) if self._last >= 0 else versions, default=None)

    def _plan(self, tracked: TrackedState) -> bool:
        """Once in a generation all members find out who has replicas where, and whether the copies fit."""
        self.settle()
        rank, ranks, replica = self._fabric.rank, self._fabric.ranks, tracked.replica_key()
        nbytes = tracked.layout().nbytes
        taken = self._own.nbytes + self._holder.shelf.nbytes
        share = Share(replica, self._fabric.address.node, nbytes, self._place(), taken, free_bytes())
        least = self._fabric.least(votes_of(share, ranks.index(rank), world=len(ranks), wanted=self.wanted is True))
        if not least:
            return False
        plan = plan_of(least, ranks)
        if plan.need and not plan.room and rank == min(ranks):
            _log.warning(
                "no mirrors: %d versions of each member's own state (%d MB here) and %d of the state that it holds for"
                " another do not fit in half of the free memory of its node; a loss without a live replica goes back to"
                " a checkpoint -> job.mirror() to have them all the same",
                VERSIONS,
                nbytes // 1_000_000,
                VERSIONS,
            )
        self._generation, self._replica = self._fabric.generation, replica
        self._short = self._holder.short = False
        self._active = plan.active
        self._sends = rank in plan.need
        self._link.say(StateKept(self._generation, rank, replica, self._active and self._sends))
        self._last = -1
        self._sender.forget()
        if not self._active:
            self._clear()
        return True

    def _stop(self) -> None:
        """All members stop alike until the next generation: one of them had no memory for a copy."""
        self._active = False
        self._sender.forget()
        self._clear()
        self._link.say(StateKept(self._generation, self._fabric.rank, self._replica, False))

    def _clear(self) -> None:
        """Copies are not made any more: what is there grows old, and must not be gone back to."""
        self._last = -1
        self._own.clear()
        self._holder.shelf.clear()

    def _place(self) -> int:
        return -1 if self._link.place is None else self._link.place.holder

    # ------------------------------------------------------------------ in a change

    def show(self, order: AskMirrors, *, streams: Sequence[Batches], checkpoint: int = -1) -> None:
        """Say what is there; it stays until the next generation. Own copies count where all `streams` can go back.

        `checkpoint` is the newest step whose part this member has written or loaded.
        """
        self.settle()
        self._holder.freeze()
        held = tuple(kept.announced() for kept in self._holder.shelf.all() if kept.rank in order.ranks)
        copies = [kept for kept in self._own.all() if private.within_reach(kept.private, streams)]
        own = tuple(kept.version for kept in copies)
        known = {rank: self._holder.private_of(rank) for rank in order.ranks}
        private_of = {rank: some for rank, some in known.items() if some}
        self._link.say(Mirrors(order.generation, own, held, private_of, checkpoint))

    def put_back(self, version: int, tracked: TrackedState, *, streams: Sequence[Batches]) -> None:
        """Be again what this member was after `version` updates. Raises StateError if that copy is not there."""
        self.settle()
        kept = self._own.get(self._fabric.rank, version)
        assert kept is not None, f"asked for version {version} of {self._own.versions(self._fabric.rank)}"
        for target, source in zip(tracked.adopt(kept.manifest), kept.views(), strict=True):
            copy_bytes(target, source)
        tracked.adopted()
        private.apply(kept.private, streams, extras=tracked.extras, buffers=tracked.own_buffers)

    def take(self, order: TakeMirror, tracked: TrackedState, *, streams: Sequence[Batches]) -> None:
        """Take the mirror that the order names and say so; or say in one line why it cannot be taken."""
        try:
            address = order.roster[order.holder]
            generation = order.generation
            with self._fabric.dial(address, "copy", timeout_s=_DIAL_TIMEOUT_S, generation=generation) as sock:
                set_timeout(sock, _DIAL_TIMEOUT_S)
                own = ask_copy(sock, self._fabric.rank, version=order.version)
                got = fetch({order.holder: sock}, order.digest, state=tracked)
        except (KeepstepError, OSError) as error:
            lost = error.lost if isinstance(error, SourcesLost) else (order.holder,)
            _log.warning("the mirror in the memory of rank %d is not used: %s", order.holder, error)
            self._link.say(FetchFailed(order.generation, lost, str(error)))
            return
        private.apply(own or order.private, streams, extras=tracked.extras, buffers=tracked.own_buffers)
        self._link.say(Fetched(order.generation, order.version, order.digest, got.bytes_moved))

    def run_on(self, version: int) -> None:
        """The new generation runs from `version`: later copies did not happen."""
        self._own.drop_newer(version)
        self._holder.run_on(version)

    def forget(self) -> None:
        """The state comes from elsewhere: no copy belongs to it any more."""
        self.settle()
        self._sender.forget()
        self._own.clear()
        self._holder.clear()

    def close(self) -> None:
        """End the threads."""
        self.settle()
        self._sender.close()
        self._private.close()
