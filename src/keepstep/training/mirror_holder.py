"""What a member holds for others: copies of their states, and what only they know, in host memory."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading

from keepstep.errors import PeerLost, TornRecord
from keepstep.training.fabric import Fabric
from keepstep.training.host_memory import Block
from keepstep.training.manifest import Manifest
from keepstep.training.mirror_wire import (
    MAX_PRIVATE,
    STALL_S,
    Offer,
    read_copy_request,
    receive_state,
    send_private_of,
)
from keepstep.training.shelf import KeptState, Shelf
from keepstep.training.statewire import receive_exactly, set_timeout
from keepstep.training.transfer import StateServer

__all__ = ["NO_MEMORY", "PRIVATE_FRAME", "MirrorHolder"]

PRIVATE_FRAME = struct.Struct("<IIQI")
"""Rank, generation, version and length in front of a rank's own state."""
NO_MEMORY = (
    "no mirrors: %d MB for a copy are refused here (%s); a loss without a live replica goes back to a checkpoint"
    " -> free memory on this node, or job.mirror(False)"
)
_TIMEOUT_S = 120.0
_MAX_RANKS = 4096
_log = logging.getLogger("keepstep")


class MirrorHolder:
    """Serves three kinds of connections: `mirror` (a copy comes), `private` (own state comes), `copy` (a joiner asks).

    A copy is taken in the generation that it was made in only, and not between `freeze` and `run_on`: what the
    controller was told must stay. `short` says that there was no memory for one.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.shelf = Shelf()
        self.short = False
        self._fabric = fabric
        self._lock = threading.Lock()  # of what follows; a copy is judged and put on the shelf while it is held
        self._frozen = False
        self._givers: dict[socket.socket, int] = {}  # with the generation of what came last
        self._private: dict[int, dict[int, bytes]] = {}
        for kind, handler in (("mirror", self._take), ("private", self._listen), ("copy", self._give)):
            fabric.serve(kind, handler)

    def private_of(self, rank: int) -> dict[int, bytes]:
        """The newest three versions of what only `rank` knows, which may be a step ahead of the others."""
        with self._lock:
            return dict(self._private.get(rank, {}))

    def freeze(self) -> None:
        """No copy comes or goes until `run_on`."""
        with self._lock:
            self._frozen = True

    def run_on(self, version: int) -> None:
        """The new generation runs from `version`: what came after it did not happen, and what is still on its way from
        an earlier generation is cut off."""
        with self._lock:
            self._frozen = False
            self.shelf.drop_newer(version)
            for known in self._private.values():
                for late in [one for one in known if one > version]:
                    del known[late]
            for sock, generation in self._givers.items():
                if generation < self._fabric.generation:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def clear(self) -> None:
        """Nothing that is held belongs to this job any more."""
        self.shelf.clear()
        with self._lock:
            self._private.clear()

    # ------------------------------------------------------------------ connections, each in its own thread

    def _take(self, sock: socket.socket) -> None:
        """Copies of one member, one after the other, until it hangs up."""
        pending: list[tuple[int, Block]] = []

        def admit(offer: Offer, manifest: Manifest) -> Block | None:
            with self._lock:
                if not self._wanted(offer.generation) or len(offer.private) > MAX_PRIVATE:
                    return None
                self._givers[sock] = offer.generation
                try:
                    block = self.shelf.room(offer.rank, manifest.nbytes)
                except OSError as error:
                    if not self.short:
                        _log.warning(NO_MEMORY, manifest.nbytes // 1_000_000, error)
                    self.short = True
                    return None
            pending.append((offer.rank, block))
            return block

        def settle(kept: KeptState) -> bool:
            with self._lock:
                if not self._wanted(kept.generation):
                    return False
                pending.clear()
                return self.shelf.put(kept)

        try:
            set_timeout(sock, STALL_S)
            while receive_state(sock, admit=admit, settle=settle):
                _await_next(sock)
        except (OSError, PeerLost, TornRecord) as error:
            if isinstance(error, TornRecord):
                _log.warning("a mirror was not taken: %s", error)
        finally:
            for rank, block in pending:
                self.shelf.give_back(rank, block)
            self._end(sock)

    def _wanted(self, generation: int) -> bool:
        """With the lock held: whether a copy made in `generation` is taken now."""
        return not self._frozen and generation == self._fabric.generation

    def _listen(self, sock: socket.socket) -> None:
        """What one member alone knows, a version at a time."""
        try:
            sock.setblocking(True)
            while True:
                rank, generation, version, length = PRIVATE_FRAME.unpack(receive_exactly(sock, PRIVATE_FRAME.size))
                if length > MAX_PRIVATE:
                    return
                data = bytes(receive_exactly(sock, length))
                with self._lock:
                    self._givers[sock] = generation
                    if generation == self._fabric.generation:
                        self._remember(rank, version, data=data)
        except (OSError, PeerLost):
            return
        finally:
            self._end(sock)

    def _remember(self, rank: int, version: int, *, data: bytes) -> None:
        """With the lock held."""
        if rank not in self._private and len(self._private) >= _MAX_RANKS:
            return
        known = self._private.setdefault(rank, {})
        known[version] = data
        for old in sorted(known)[:-3]:
            del known[old]

    def _end(self, sock: socket.socket) -> None:
        """Close a connection; from here on nobody cuts it off."""
        with self._lock:
            self._givers.pop(sock, None)
            sock.close()

    def _give(self, sock: socket.socket) -> None:
        """A joiner takes the copy of the rank it has got."""
        try:
            set_timeout(sock, _TIMEOUT_S)
            kept = self.shelf.get(*read_copy_request(sock))
            send_private_of(sock, kept)
        except (OSError, PeerLost, TornRecord):
            sock.close()
            return
        image = None if kept is None else kept.image()
        StateServer(lambda: image).handle(sock)


def _await_next(sock: socket.socket) -> None:
    """Between two copies any time may pass: return when something comes, or the other side hangs up."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()
