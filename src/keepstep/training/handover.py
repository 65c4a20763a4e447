"""Handing state over: a parked stayer shows its state, a joiner takes it from all sources at once."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

from keepstep.errors import MembershipError, TransportError
from keepstep.records.domain_messages import StateTaken
from keepstep.records.messages import Address, Fetch, Fetched, FetchFailed, PeerLostReport
from keepstep.training import private
from keepstep.training.agent_link import AgentLink
from keepstep.training.data import Batches
from keepstep.training.fabric import Fabric
from keepstep.training.manifest import Image
from keepstep.training.state import TrackedState
from keepstep.training.transfer import SourcesLost, StateServer, fetch

__all__ = ["Handover"]

_DIAL_TIMEOUT_S = 5.0  # a frozen source must not hold the joiner up
_LATE_S = 0.5
_log = logging.getLogger("keepstep")


class Handover:
    """Serves the state of a parked member to joiners, and takes it when this member is the joiner."""

    def __init__(self, fabric: Fabric, link: AgentLink) -> None:
        self._fabric = fabric
        self._link = link
        self._image: Image | None = None
        self.server = StateServer(lambda: self._image)
        fabric.serve("state", self.server.handle)

    def report_loss(self, rank: int) -> None:
        """Tell the controller that the link to `rank` broke (its agent usually reports the death itself)."""
        self._link.say(PeerLostReport(self._fabric.generation, rank))

    def show(self, tracked: TrackedState) -> Image:
        """Serve the state as it is now until `hide()`; it must not change meanwhile."""
        self._image = tracked.image()
        return self._image

    def hide(self) -> None:
        """Stop serving: the state is about to change."""
        self._image = None

    def take(self, order: Fetch, tracked: TrackedState, *, streams: Sequence[Batches]) -> None:
        """Copy the state of `order.version` and say so; or say which sources were lost."""
        sources = self._dial(order)
        try:
            got = fetch(sources, order.digest, state=tracked)
        except SourcesLost as error:
            self._link.say(FetchFailed(order.generation, error.lost, str(error)))
            return
        finally:
            for sock in sources.values():
                sock.close()
        for other in got.diverged:
            _log.warning("state_divergence: rank %d differs from the other replicas at %s", other.rank, other.entry)
        if not order.private:
            _log.warning(
                "the lost rank's random numbers and data position are unknown: this rank starts with its own, and with"
                " the extra objects of its replica"
            )
        private.apply(order.private, streams, extras=tracked.extras, buffers=tracked.own_buffers)
        self._link.say(StateTaken(order.generation, self._fabric.rank, got.by_source))
        self._link.say(Fetched(order.generation, order.version, order.digest, got.bytes_moved))

    def _dial(self, order: Fetch) -> dict[int, socket.socket]:
        """Connections to the sources, all called at once: the way to one of them may swallow what it is given."""
        calls = _Calls(len(order.sources))
        for rank in order.sources:
            threading.Thread(
                target=self._call, args=(rank, calls), kwargs={"order": order}, name=f"state-{rank}", daemon=True
            ).start()
        return calls.answered()

    def _call(self, rank: int, calls: _Calls, *, order: Fetch) -> None:
        sock = None
        address: Address = order.roster[rank]
        try:
            sock = self._fabric.dial(address, "state", timeout_s=_DIAL_TIMEOUT_S, generation=order.generation)
        except (TransportError, MembershipError, OSError) as error:
            _log.warning("state source rank %d does not answer: %s", rank, error)
        calls.ended(rank, sock)


class _Calls:
    """So many calls that are under way at once."""

    def __init__(self, count: int) -> None:
        self._change = threading.Condition()
        self._left = count
        self._socks: dict[int, socket.socket] = {}
        self._over = False

    def ended(self, rank: int, sock: socket.socket | None) -> None:
        """A call has got through, or has not; one that comes too late is hung up."""
        with self._change:
            self._left -= 1
            if sock is not None and self._over:
                sock.close()
            elif sock is not None:
                self._socks[rank] = sock
            self._change.notify_all()

    def answered(self) -> dict[int, socket.socket]:
        """The connections by rank. Once there is one, the others have a moment left."""
        with self._change:
            self._change.wait_for(lambda: bool(self._socks) or not self._left)
            self._change.wait_for(lambda: not self._left, _LATE_S)
            self._over = True
            return self._socks
