"""Brings a member's copies to the member that holds its mirror, beside training.

One thread copies, another one sends: a copy never waits for a holder, which may be frozen or gone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable

from keepstep.errors import MembershipError, PeerLost, TornRecord, TransportError
from keepstep.training.fabric import Fabric
from keepstep.training.mirror_holder import PRIVATE_FRAME
from keepstep.training.mirror_wire import MAX_PRIVATE, STALL_S, Offer, send_state
from keepstep.training.shelf import KeptState, Shelf
from keepstep.training.state_copy import StateCopy
from keepstep.training.statewire import set_timeout

__all__ = ["MirrorSender", "PrivateSender"]

_DIAL_TIMEOUT_S = 5.0
_AGAIN_S = 0.2
_BACK_OFF_S = 1.0
_LOST_MS = 10_000
_LOOK_S = 0.0005
_LOOKS = 8
_NOBODY = (-1, -1)
_log = logging.getLogger("keepstep")


class MirrorSender:
    """Completes copies and sends them. `stored` is the newest version that the holder has confirmed (or, where
    nobody needs to hold it, that is complete here), -1: none."""

    def __init__(self, fabric: Fabric, own: Shelf, *, place: Callable[[], int]) -> None:
        """`place` gives the rank of the holder now, -1: nobody."""
        self.stored = -1
        self.bytes_sent = 0
        self._fabric = fabric
        self._own = own
        self._place = place
        self._copies: queue.SimpleQueue[tuple[StateCopy, int, bool] | None] = queue.SimpleQueue()
        self._whole: queue.SimpleQueue[tuple[StateCopy, KeptState, bool] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of what follows, and of the moment in which a version counts as stored
        self._newest: StateCopy | None = None
        self._sock: socket.socket | None = None
        self._to = _NOBODY
        self._stop = threading.Event()

    def submit(self, copy: StateCopy, *, generation: int, send: bool) -> None:
        """Complete `copy` and, with `send`, bring it to the holder. What is still under way is given up."""
        if not self._threads:
            for name, one in (("keepstep-copy", self._complete), ("keepstep-mirror", self._bring)):
                self._threads.append(threading.Thread(target=_repeat, args=(one,), name=name, daemon=True))
                self._threads[-1].start()
        with self._lock:
            self._newest = copy
        self._copies.put((copy, generation, send))

    def forget(self) -> None:
        """Nothing is stored; what is being sent is cut off and does not count."""
        with self._lock:
            self._newest = None
            self.stored = -1
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the threads; waits until it has seen it."""
        self._stop.set()
        self.forget()
        self._copies.put(None)
        for thread in self._threads:
            thread.join(2.0)

    # ------------------------------------------------------------------ the thread that copies

    def _complete(self) -> bool:
        """The next copy; False at the end. Nothing of it stays in a variable: its block may be given up later."""
        job = self._copies.get()
        if job is not None:
            copy, generation, send = job
            kept = KeptState(self._fabric.rank, copy.version, generation, copy.manifest, "", copy.private, copy.block)
            copy.run(functools.partial(self._own.put, kept))
            self._whole.put((copy, kept, send))
        else:
            self._whole.put(None)
        return job is not None

    # ------------------------------------------------------------------ the thread that sends

    def _bring(self) -> bool:
        """The next whole copy; False at the end."""
        job = self._whole.get()
        if job is None:
            self._hang_up()
            return False
        copy, kept, send = job
        while self._wanted(copy):
            if not send or self._sent(kept, copy):
                self._note(copy)
                break
            self._stop.wait(_AGAIN_S)
        return True

    def _wanted(self, copy: StateCopy) -> bool:
        with self._lock:
            return copy is self._newest and not self._stop.is_set()

    def _note(self, copy: StateCopy) -> None:
        with self._lock:
            if copy is self._newest:
                self.stored = copy.version

    def _sent(self, kept: KeptState, copy: StateCopy) -> bool:
        """One attempt."""
        offer = Offer(kept.rank, kept.version, kept.generation, kept.manifest.encode(), kept.private)
        try:
            send_state(self._connected(copy), offer, block=kept.block, gap=self._gap)
        except (OSError, PeerLost, TornRecord, TransportError, MembershipError) as error:
            _log.debug("mirror of version %d: %s", kept.version, error)
            self._hang_up()
            return False
        self.bytes_sent += kept.manifest.nbytes
        return True

    def _connected(self, copy: StateCopy) -> socket.socket:
        """The connection to the holder of now. Raises PeerLost, MembershipError, OSError."""
        to = (self._place(), self._fabric.generation)
        if self._sock is None or to != self._to:
            self._hang_up()
            if to[0] < 0:
                raise PeerLost("nobody holds a mirror of this rank")
            address = self._fabric.directory.resolve(to[0], _DIAL_TIMEOUT_S)
            sock = self._fabric.dial(address, "mirror", timeout_s=_DIAL_TIMEOUT_S)
            set_timeout(sock, STALL_S)
            with self._lock:
                if copy is not self._newest:
                    sock.close()
                    raise PeerLost("the copy was given up while the holder was called")
                self._sock, self._to = sock, to
        return self._sock

    def _gap(self) -> None:
        """Wait for a moment without a collective, but not for long."""
        for _ in range(_LOOKS):
            if self._fabric.quiet() or self._stop.wait(_LOOK_S):
                return

    def _hang_up(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


def _repeat(one: Callable[[], bool]) -> None:
    """Call `one` until it gives False."""
    while one():
        pass


class PrivateSender:
    """Tells the holder, where that is on another node, what only this rank knows: from the training thread, and never
    waiting for it. What does not go through at once is left out; a connection that breaks, or takes nothing for ten
    seconds, is made again."""

    def __init__(self, fabric: Fabric, *, place: Callable[[], int]) -> None:
        self._fabric = fabric
        self._place = place
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._rest = b""  # of a frame that was sent in part
        self._newest = (0, b"")
        self._to = self._dialling = self._near = _NOBODY  # connected to, being called, and on this node
        self._stop = threading.Event()

    def tell(self, version: int, data: bytes) -> None:
        """Send the newest version."""
        to = (self._place(), self._fabric.generation)
        if to[0] < 0 or len(data) > MAX_PRIVATE:
            return
        with self._lock:
            self._newest = (version, data)
            if to != self._to:
                self._drop()
                self._to = to
            self._send()
            if self._sock is None and to not in (self._dialling, self._near) and not self._stop.is_set():
                self._dialling = to
                threading.Thread(target=self._dial, args=(to,), name="keepstep-private", daemon=True).start()

    def close(self) -> None:
        """Hang up."""
        self._stop.set()
        with self._lock:
            self._drop()

    def _send(self) -> None:
        """With the lock held: what is left of the frame before, then the newest version, if the socket takes them."""
        if self._sock is None:
            return
        version, data = self._newest
        try:
            if self._rest:
                self._rest = self._rest[self._sock.send(self._rest, socket.MSG_DONTWAIT) :]
            if not self._rest:
                frame = PRIVATE_FRAME.pack(self._fabric.rank, self._to[1], version, len(data)) + data
                self._rest = frame[self._sock.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return
        except OSError:
            self._drop()

    def _dial(self, to: tuple[int, int]) -> None:
        """Call the holder once; after a failure the next call has to wait a little."""
        sock = near = None
        try:
            address = self._fabric.directory.resolve(to[0], _DIAL_TIMEOUT_S)
            near = address.node == self._fabric.address.node
            if not near:  # on this node the agent's memory outlives the process; that of the node nobody does
                sock = self._fabric.dial(address, "private", timeout_s=_DIAL_TIMEOUT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
        except (TransportError, MembershipError, OSError) as error:
            _log.debug("the holder of what only this rank knows does not answer: %s", error)
            self._stop.wait(_BACK_OFF_S)
        with self._lock:
            if self._dialling == to:
                self._dialling = _NOBODY
            if near:
                self._near = to
            if sock is None:
                return
            if self._to != to or self._stop.is_set():
                sock.close()
                return
            self._drop()
            self._sock = sock
            self._send()

    def _drop(self) -> None:
        self._rest = b""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
