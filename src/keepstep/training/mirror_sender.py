"""Brings a member's copies to the member that holds its mirror, beside training: one thread, one copy at a time."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable

from keepstep.errors import MembershipError, PeerLost, TornRecord, TransportError
from keepstep.training.fabric import Fabric
from keepstep.training.mirror_holder import PRIVATE_FRAME
from keepstep.training.mirror_wire import Offer, send_state
from keepstep.training.shelf import KeptState, Shelf
from keepstep.training.state_copy import StateCopy

__all__ = ["MirrorSender", "PrivateSender"]

_DIAL_TIMEOUT_S = 5.0
_AGAIN_S = 0.2
_LOOK_S = 0.0005
_LOOKS = 8
_log = logging.getLogger("keepstep")


class MirrorSender:
    """Completes copies and sends them. `stored` is the newest version that the holder has confirmed (or, where
    nobody needs to hold it, that is complete here), -1: none. `on_stored` gets the bytes of each."""

    def __init__(self, fabric: Fabric, own: Shelf, *, place: Callable[[], int]) -> None:
        """`place` gives the rank of the holder now, -1: nobody."""
        self.stored = -1
        self.bytes_sent = 0
        self._fabric = fabric
        self._own = own
        self._place = place
        self._copies: queue.SimpleQueue[tuple[StateCopy, int, bool] | None] = queue.SimpleQueue()
        self._newest: StateCopy | None = None
        self._thread: threading.Thread | None = None
        self._sock: socket.socket | None = None
        self._to = (-1, -1)
        self._stop = threading.Event()

    def submit(self, copy: StateCopy, *, generation: int, send: bool) -> None:
        """Complete `copy` and, with `send`, bring it to the holder. What is still under way is given up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keepstep-mirror", daemon=True)
            self._thread.start()
        self._newest = copy
        self._copies.put((copy, generation, send))

    def forget(self) -> None:
        """Nothing is stored, what is under way does not count."""
        self._newest = None
        self.stored = -1

    def close(self) -> None:
        """End the thread; waits until it has seen it."""
        self._stop.set()
        self._newest = None
        if self._thread is not None:
            self._copies.put(None)
            with contextlib.suppress(OSError):
                if self._sock is not None:
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(2.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (job := self._copies.get()) is not None:
            copy, generation, send = job
            copy.run()
            kept = KeptState(self._fabric.rank, copy.version, generation, copy.manifest, "", copy.private, copy.block)
            self._own.put(kept)
            while copy is self._newest and not self._stop.is_set():
                if not send or self._sent(kept):
                    if copy is self._newest:
                        self.stored = copy.version
                    break
                self._stop.wait(_AGAIN_S)
        self._hang_up()

    def _sent(self, kept: KeptState) -> bool:
        """One attempt."""
        offer = Offer(kept.rank, kept.version, kept.generation, kept.manifest.encode(), kept.private)
        try:
            send_state(self._connected(), offer, block=kept.block, gap=self._gap)
        except (OSError, PeerLost, TornRecord, TransportError, MembershipError) as error:
            _log.debug("mirror of version %d: %s", kept.version, error)
            self._hang_up()
            return False
        self.bytes_sent += kept.manifest.nbytes
        return True

    def _connected(self) -> socket.socket:
        """The connection to the holder of now. Raises PeerLost, MembershipError."""
        to = (self._place(), self._fabric.generation)
        if self._sock is None or to != self._to:
            self._hang_up()
            if to[0] < 0:
                raise PeerLost("nobody holds a mirror of this rank")
            address = self._fabric.directory.resolve(to[0], _DIAL_TIMEOUT_S)
            self._sock = self._fabric.dial(address, "mirror", timeout_s=_DIAL_TIMEOUT_S)
            self._sock.setblocking(True)
            self._to = to
        return self._sock

    def _gap(self) -> None:
        """Wait for a moment without a collective, but not for long."""
        for _ in range(_LOOKS):
            if self._fabric.quiet() or self._stop.wait(_LOOK_S):
                return

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class PrivateSender:
    """Tells the holder, where that is on another node, what only this rank knows: from the training thread, and never
    waiting for it. What does not go through at once is left out."""

    def __init__(self, fabric: Fabric, *, place: Callable[[], int]) -> None:
        self._fabric = fabric
        self._place = place
        self._sock: socket.socket | None = None
        self._to: tuple[int, int] = (-1, -1)
        self._lock = threading.Lock()

    def tell(self, version: int, data: bytes) -> None:
        """Send the newest version."""
        to = (self._place(), self._fabric.generation)
        if to[0] < 0:
            return
        if to != self._to:
            self._to = to
            threading.Thread(target=self._dial, args=(to, version), kwargs={"data": data}, daemon=True).start()
            return
        with self._lock:
            self._send(version, data)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._drop()

    def _send(self, version: int, data: bytes) -> None:
        if self._sock is None:
            return
        frame = PRIVATE_FRAME.pack(self._fabric.rank, self._to[1], version, len(data)) + data
        try:
            if self._sock.send(frame, socket.MSG_DONTWAIT) != len(frame):
                self._drop()
        except OSError:
            self._drop()

    def _dial(self, to: tuple[int, int], version: int, *, data: bytes) -> None:
        try:
            address = self._fabric.directory.resolve(to[0], _DIAL_TIMEOUT_S)
            if address.node == self._fabric.address.node:
                return  # the agent's memory outlives the process; that of the node nobody does
            sock = self._fabric.dial(address, "private", timeout_s=_DIAL_TIMEOUT_S)
        except (TransportError, MembershipError, OSError):
            return
        sock.setblocking(True)
        with self._lock:
            self._drop()
            if self._to == to:
                self._sock = sock
                self._send(version, data)
            else:
                sock.close()

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
