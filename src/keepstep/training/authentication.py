"""The hello of every connection between members: both sides prove that they know the job's secret.

    acceptor -> dialer    "KSH1" | nonce A (32)
    dialer   -> acceptor  u32 length of body | nonce B (32) | body | HMAC(secret, "dialer" A B body)
    acceptor -> dialer    verdict (1) | HMAC(secret, "acceptor" verdict A B body)
    dialer   -> acceptor  "C"                           only after a verdict WELCOME

HMAC is HMAC-SHA256. The body is a MessagePack `Greeting`; it names the target, so that a hello cannot be replayed to
another member. A connection counts for the acceptor only after the last byte: a dialer that gives up leaves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
from enum import IntEnum

import msgspec

from keepstep.errors import Fenced, GroupAborted, HelloCut, PeerLost

__all__ = [
    "Arrival",
    "Greeting",
    "Verdict",
    "greet",
]

_MAGIC = b"KSH1"
_COMMIT = b"C"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_BODY_BYTES = 2048
_HEAD = struct.Struct("<I32s")
_MAX_READS = 64


class Verdict(IntEnum):
    """What the acceptor says to a hello whose proof was right."""

    WELCOME = 0
    STALE = 1  # an older generation
    STRANGER = 2  # not in the roster, or meant for somebody else
    CROSSED = 3  # the acceptor is dialling the same link itself; wait for its call
    UNKNOWN = 4  # nobody serves this kind
    PARKED = 250  # never sent: decide later


class Greeting(msgspec.Struct, frozen=True):
    """Who calls (`member`, global `rank`, `generation`), whom (`target`), and for what.

    `kind` is "link", "watch" or a served kind. A link names its `group` and `lane`. `shared` says that a memory file
    descriptor comes along.
    """

    kind: str
    member: str
    rank: int
    target: str
    generation: int
    group: str = ""
    lane: int = 0
    shared: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Greeting)


def _proof(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, side + b"".join(parts), hashlib.sha256).digest()


class Arrival:
    """The acceptor's half of one hello on a non-blocking socket; `advance` is called when the socket is readable.

    Bounded: at most 2 KiB of body, one file descriptor and 64 reads.
    """

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock = sock
        self.age = 0
        self.greeting: Greeting | None = None
        self.memory_fd = -1
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES)
        self._other = b""
        self._body = b""
        self._data = bytearray()
        self._need = _HEAD.size
        self._reads = 0
        sock.setblocking(False)
        sock.send(_MAGIC + self._nonce)

    def advance(self) -> bool:
        """Reads what is there. True: a proven `greeting` waits for its verdict. Raises PeerLost for any fault."""
        self._read()
        while len(self._data) == self._need:
            if self._other:
                self._prove()
                return True
            length, self._other = _HEAD.unpack(bytes(self._data))
            if not 0 < length <= _MAX_BODY_BYTES:
                raise PeerLost(f"hello of {length} bytes refused", remedy="only keepstep members may connect here")
            self._need, self._data = length + _PROOF_BYTES, bytearray()
            self._read()
        return False

    def committed(self) -> bool:
        """Whether the dialer has confirmed a WELCOME. Raises PeerLost if it hung up or said something else."""
        try:
            said = self.sock.recv(1)
        except BlockingIOError:
            return False
        if said != _COMMIT:
            raise PeerLost("the dialer gave up its call")
        return True

    def answer(self, verdict: Verdict) -> None:
        """Sends the verdict with our proof. Raises OSError if the dialer is gone."""
        said = bytes([verdict])
        self.sock.send(said + _proof(self._secret, b"acceptor", said, self._nonce, self._other, self._body))

    def drop(self) -> None:
        """Closes the connection and the memory that came with it."""
        self.sock.close()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1

    def _read(self) -> None:
        self._reads += 1
        if self._reads > _MAX_READS:
            raise PeerLost("a hello in too many pieces was refused")
        try:
            data = self._receive(self._need - len(self._data))
        except BlockingIOError:
            return
        if not data:
            raise PeerLost("a connection was closed during its hello")
        self._data += data

    def _receive(self, most: int) -> bytes:
        if self.sock.family != socket.AF_UNIX:
            return self.sock.recv(most)
        data, descriptors, _, _ = socket.recv_fds(self.sock, most, 1)
        for descriptor in descriptors:
            if self.memory_fd >= 0:
                os.close(descriptor)
            else:
                self.memory_fd = descriptor
        return data

    def _prove(self) -> None:
        self._body, proof = bytes(self._data[:-_PROOF_BYTES]), bytes(self._data[-_PROOF_BYTES:])
        expected = _proof(self._secret, b"dialer", self._nonce, self._other, self._body)
        if not hmac.compare_digest(proof, expected):
            raise PeerLost("a hello with a wrong proof was refused", remedy="the caller has another job's secret")
        try:
            self.greeting = _decoder.decode(self._body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PeerLost(f"not a keepstep hello: {error}") from error
        if self.greeting.shared != (self.memory_fd >= 0):
            raise PeerLost("a hello with missing or unexpected shared memory was refused")


class _Caller:
    """The dialer's reads and writes, all bounded by a time and cut short by `interrupt_fd`."""

    def __init__(self, sock: socket.socket, timeout_s: float, *, interrupt_fd: int) -> None:
        self.sock = sock
        self.timeout_ms = max(1, int(timeout_s * 1000))
        self.interrupt_fd = interrupt_fd
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        if interrupt_fd >= 0:
            self.poll.register(interrupt_fd, select.POLLIN)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            ready = dict(self.poll.poll(self.timeout_ms))
            if self.interrupt_fd in ready:
                raise GroupAborted("the call was interrupted by an abort")
            if not ready:
                raise PeerLost("no answer to the hello in time")
            try:
                piece = self.sock.recv(count - len(data))
            except ConnectionError:
                piece = b""
            if not piece:
                raise HelloCut("the hello was refused", remedy="check that all members have the same job secret")
            data += piece
        return data


def greet(
    sock: socket.socket,
    greeting: Greeting,
    *,
    secret: bytes,
    timeout_s: float,
    interrupt_fd: int = -1,
    memory_fd: int = -1,
) -> Verdict:
    """The dialer's half on a connected socket. Returns WELCOME or CROSSED; after WELCOME the connection stands.

    Raises Fenced where the acceptor does not want this member (any more), GroupAborted when `interrupt_fd` becomes
    readable while waiting, PeerLost for everything else.
    """
    caller = _Caller(sock, timeout_s, interrupt_fd=interrupt_fd)
    opening = caller.read(len(_MAGIC) + _NONCE_BYTES)
    if opening[: len(_MAGIC)] != _MAGIC:
        raise PeerLost("the other side does not speak keepstep's hello")
    nonce, own = opening[len(_MAGIC) :], os.urandom(_NONCE_BYTES)
    body = _encoder.encode(greeting)
    if len(body) > _MAX_BODY_BYTES:
        raise PeerLost(f"hello of {len(body)} bytes is too long", remedy="use shorter group names")
    message = _HEAD.pack(len(body), own) + body + _proof(secret, b"dialer", nonce, own, body)
    if memory_fd >= 0:
        socket.send_fds(sock, [message], [memory_fd])
    else:
        sock.sendall(message)
    reply = caller.read(1 + _PROOF_BYTES)
    if not hmac.compare_digest(reply[1:], _proof(secret, b"acceptor", reply[:1], nonce, own, body)):
        raise PeerLost("the other side could not prove that it knows the job's secret")
    return _judge(sock, reply[0], greeting=greeting)


def _judge(sock: socket.socket, said: int, *, greeting: Greeting) -> Verdict:
    if said == Verdict.WELCOME:
        sock.sendall(_COMMIT)
        return Verdict.WELCOME
    if said == Verdict.CROSSED:
        return Verdict.CROSSED
    if said in (Verdict.STALE, Verdict.STRANGER):
        why = "an older generation" if said == Verdict.STALE else "not in the roster"
        raise Fenced(
            f"{greeting.target} refused {greeting.member} of generation {greeting.generation}: {why}",
            remedy="this member's place was given to another one; let it exit",
        )
    raise PeerLost(f"{greeting.target} does not serve connections of kind {greeting.kind!r}")
