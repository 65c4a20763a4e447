"""Handing state over: a parked stayer shows its state, a joiner takes it from all sources at once."""

from __future__ import annotations

import logging
import socket
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
        private.apply(order.private, streams, extras=tracked.extras)
        self._link.say(StateTaken(order.generation, self._fabric.rank, got.by_source))
        self._link.say(Fetched(order.generation, order.version, order.digest, got.bytes_moved))

    def _dial(self, order: Fetch) -> dict[int, socket.socket]:
        sources: dict[int, socket.socket] = {}
        for rank in order.sources:
            address: Address = order.roster[rank]
            try:
                sources[rank] = self._fabric.dial(
                    address, "state", timeout_s=_DIAL_TIMEOUT_S, generation=order.generation
                )
            except (TransportError, MembershipError, OSError) as error:
                _log.warning("state source rank %d does not answer: %s", rank, error)
        return sources
