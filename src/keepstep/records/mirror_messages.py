"""What members and the controller say to each other about mirrors: copies of a rank's state in another's memory."""

from __future__ import annotations

import msgspec

from keepstep.records.address import Address

__all__ = [
    "AskMirrors",
    "HeldMirror",
    "MirrorFact",
    "MirrorOrder",
    "Mirrors",
    "PlaceMirror",
    "Return",
    "TakeMirror",
]


class HeldMirror(msgspec.Struct, frozen=True, array_like=True):
    """The state of `rank` after `version` updates, whole, in the memory of the member that says so.

    `digest` and `replica` as in `Settled`.
    """

    rank: int
    version: int
    digest: str
    replica: str
    nbytes: int = 0


class _Said(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of these messages: the tag is the class name."""


class Mirrors(_Said, frozen=True, tag=True):
    """What a stayer has: its `own` state at these versions, mirrors it `held`, and lost ranks' own state by version.

    `checkpoint` is the newest step whose part it has written or loaded (-1: none).
    """

    generation: int
    own: tuple[int, ...] = ()
    held: tuple[HeldMirror, ...] = ()
    private: dict[int, dict[int, bytes]] = {}
    checkpoint: int = -1


class _Ordered(_Said, frozen=True):
    """Base of orders: `epoch` is the leader's."""

    epoch: int


class PlaceMirror(_Ordered, frozen=True, tag=True):
    """From `generation` on `holder` (a rank; -1: nobody) keeps your mirror. No answer."""

    generation: int
    holder: int


class AskMirrors(_Ordered, frozen=True, tag=True):
    """`ranks` are lost: say what you have. Answer: `Mirrors`."""

    generation: int
    ranks: tuple[int, ...]


class Return(_Ordered, frozen=True, tag=True):
    """Put your own copy of `version` back. Answer: `Settled`."""

    generation: int
    version: int


class TakeMirror(_Ordered, frozen=True, tag=True):
    """Take your rank's state of `version` with `digest` from the mirror that `holder` has. Answer: `Fetched`.

    `private` is the lost rank's own state where the mirror has none (empty: unknown).
    """

    generation: int
    version: int
    digest: str
    holder: int
    roster: dict[int, Address]
    private: bytes = b""


MirrorFact = Mirrors
MirrorOrder = PlaceMirror | AskMirrors | Return | TakeMirror
