"""The member's end of its link to the agent: blocking, usable from threads, no event loop.

Messages keep their order. Descriptors (the recorder ring) arrive beside them and are taken separately.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from typing import Protocol

from keepstep.errors import PeerLost, TransportError
from keepstep.records.messages import Message, decode_message, encode_message
from keepstep.store.packets import MAX_PACKET_BYTES, Assembler, PacketKind, split_message
from keepstep.store.unix_socket import connect_unix

__all__ = ["MemberWire", "Wire"]

_MAX_DESCRIPTORS = 8
_MAX_WAITING = 1024


class MemberWire(Protocol):
    """What a member can do with its link; `Wire` and its in-memory twin both are one."""

    def send(self, message: Message) -> None:
        """Send one message; any thread. Raises PeerLost if the agent is gone."""

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after `timeout_s` seconds. Raises PeerLost at the end."""

    def receive_descriptor(self, timeout_s: float | None = None) -> int:
        """The next file descriptor, which the caller closes. Raises PeerLost, and TransportError on time-out."""

    def close(self) -> None:
        """End the link; a `receive` in another thread ends with PeerLost."""


class Wire:
    """The link over a socket. One lock for sending, one for receiving."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._assembler = Assembler()
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int] = deque()
        self._ended = False
        self._closed = False

    @classmethod
    def connect(cls, name: str, *, timeout_s: float = 5.0) -> Wire:
        """Connect to the agent that serves `name`. Raises EnvironmentProblem if nobody answers."""
        return cls(connect_unix(name, timeout_s=timeout_s))

    def send(self, message: Message) -> None:
        """Send one message; any thread, whole messages never mix. Raises PeerLost if the agent is gone."""
        data = encode_message(message)
        with self._sending:
            if self._closed:
                raise PeerLost("the link to the agent is closed")
            try:
                for packet in split_message(data):
                    self._link.sendall(packet)
            except OSError as error:
                raise PeerLost(f"the agent is gone: {error.strerror}") from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if no packet came for `timeout_s` seconds (None: wait for ever).

        Raises PeerLost once everything that was sent has been read and the agent is gone, and TransportError or
        RecordError for bytes that are not a message.
        """
        with self._receiving:
            while not self._messages:
                if not self._pump(timeout_s):
                    return None
            return self._messages.popleft()

    def receive_descriptor(self, timeout_s: float | None = None) -> int:
        """The next file descriptor, which the caller closes; messages before it stay in line.

        Raises PeerLost if the agent is gone and TransportError if no packet came for `timeout_s` seconds.
        """
        with self._receiving:
            while not self._descriptors:
                if not self._pump(timeout_s):
                    raise TransportError(f"no file descriptor came from the agent within {timeout_s} s")
            return self._descriptors.popleft()

    def fileno(self) -> int:
        """The socket's descriptor, for poll; it is readable when a packet waits (not when a message is in line)."""
        return self._link.fileno()

    def close(self) -> None:
        """End the link; a `receive` or `send` in another thread ends with PeerLost. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        with self._sending, self._receiving:
            self._link.close()
            while self._descriptors:
                os.close(self._descriptors.popleft())

    def _pump(self, timeout_s: float | None) -> bool:
        """Take one packet in; False if none came within `timeout_s`. Raises PeerLost at the end."""
        if self._closed or self._ended:
            raise PeerLost("the link to the agent is closed" if self._closed else "the agent is gone")
        if timeout_s is not None and not _readable(self._link, timeout_s):
            return False
        try:
            packet, ancillary, _flags, _address = self._link.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return True  # the agent left without reading all of ours; what it sent is still behind this
        except OSError as error:
            self._ended = True
            raise PeerLost(f"the agent is gone: {error.strerror}") from error
        descriptors = _descriptors_in(ancillary)
        if not packet:
            self._ended = True
            _close_all(descriptors)
            raise PeerLost("the agent is gone")
        self._take(packet, descriptors)
        return True

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        got = self._assembler.take(packet)
        expected = 1 if got is not None and got[0] is PacketKind.DESCRIPTOR else 0
        if len(descriptors) != expected or len(self._descriptors) + expected > _MAX_DESCRIPTORS:
            _close_all(descriptors)
            raise TransportError(f"a packet with {len(descriptors)} file descriptors, {expected} expected")
        self._descriptors.extend(descriptors)
        if got is not None and got[0] is PacketKind.MESSAGE:
            if len(self._messages) >= _MAX_WAITING:
                raise TransportError(f"more than {_MAX_WAITING} messages wait to be read")
            self._messages.append(decode_message(got[1]))


def _readable(link: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(link, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
