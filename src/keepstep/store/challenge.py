"""Proof on both sides that they know the same token, without sending it, and a seal on every frame after that.

HMAC (RFC 2104) with SHA-256. The listening side sends a nonce S; the connecting side answers with its nonce C and
HMAC(token, "connects" S C); the listening side answers HMAC(token, "listens" S C). The key of the seals is
HMAC(token, "seals" S C), different for every connection; the counter in a seal stops replay and reordering.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from keepstep.errors import TransportError

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Seals", "proof", "proves"]

NONCE_BYTES = 32
PROOF_BYTES = 32
_SEAL_BYTES = 16


def proof(token: str, part: bytes, *, nonces: bytes) -> bytes:
    """What only a holder of `token` can say for these nonces in the `part` of b"connects", b"listens" or b"seals"."""
    return hmac.digest(token.encode(), b"keepstep 1 " + part + b" " + nonces, hashlib.sha256)


def proves(said: bytes, token: str, *, part: bytes, nonces: bytes) -> bool:
    """True if `said` is that proof; takes the same time for every wrong one."""
    return hmac.compare_digest(said, proof(token, part, nonces=nonces))


class Seals:
    """Seals frames of one connection; each direction has a key half and a counter of its own."""

    def __init__(self, key: bytes, *, listens: bool) -> None:
        self._key = key
        self._mine, self._theirs = (b"L", b"C") if listens else (b"C", b"L")
        self._sent = 0
        self._received = 0

    def seal(self, data: bytes) -> bytes:
        """`data` with its seal before it."""
        sealed = self._seal(self._mine, self._sent, data=data) + data
        self._sent += 1
        return sealed

    def open(self, frame: bytes) -> bytes:
        """The data of the next frame. Raises TransportError if its seal is wrong."""
        seal, data = frame[:_SEAL_BYTES], frame[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(self._theirs, self._received, data=data)):
            raise TransportError("a frame with a wrong seal", remedy="look for a program that changes the traffic")
        self._received += 1
        return data

    def _seal(self, side: bytes, counter: int, *, data: bytes) -> bytes:
        message = side + struct.pack("<Q", counter) + data
        return hmac.digest(self._key, message, hashlib.sha256)[:_SEAL_BYTES]
