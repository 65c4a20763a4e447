"""What members and the controller say to each other about a planned move: one or several ranks change their member.

Words: the *leaver* holds a rank and gives it up, the *joiner* takes it, *stayers* are all others; a stayer is
*affected* if it has links to a leaver. Orders carry the leader `epoch`; everything carries the `number` of the move.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.records.address import Address

__all__ = [
    "AskAddress",
    "CancelMove",
    "CommitMove",
    "MoveCommitted",
    "MoveFact",
    "MoveOrder",
    "MovePrepared",
    "MoveRefused",
    "MoveTaken",
    "PrepareMove",
    "ReleaseMember",
    "TakeAddress",
]


class _Said(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of these messages: the tag is the class name."""


# ---------------------------------------------------------------- orders


class _Ordered(_Said, frozen=True):
    """Base of orders: `epoch` is the leader's."""

    epoch: int


class PrepareMove(_Ordered, frozen=True, tag=True):
    """Build what can be built beside training for the move to `generation`. Answer: `MovePrepared`.

    `generation` is the one that every member installs at the commit, `ranks` gives the joiner of each rank that moves.
    `part` is the receiver's. A joiner also gets the `roster` of all ranks as it will be after the move and the
    address of its own `leaver`.
    """

    number: int
    generation: int
    part: Literal["leave", "join", "stay"]
    ranks: dict[int, Address]
    roster: dict[int, Address] = {}
    leaver: Address | None = None


class CommitMove(_Ordered, frozen=True, tag=True):
    """To the leavers: commit at the next boundary. Answer: `MoveCommitted` or `MoveRefused`.

    `failed` votes about the move went before; one that a leaver has seen since, at the word of another, is this one.
    """

    number: int
    failed: int = 0


class CancelMove(_Ordered, frozen=True, tag=True):
    """The move will not be made: drop what was prepared for it. No answer."""

    number: int
    why: str


class ReleaseMember(_Ordered, frozen=True, tag=True):
    """To a leaver that has handed over: nothing is wanted from you any more, exit with status 0."""

    number: int
    why: str


class TakeAddress(_Ordered, frozen=True, tag=True):
    """Answer to `AskAddress`: `rank` is reached at `address` in `generation`."""

    rank: int
    address: Address
    generation: int


# ---------------------------------------------------------------- facts


class MovePrepared(_Said, frozen=True, tag=True):
    """A member is ready to commit, or says `why` it cannot be.

    `peers` are the ranks a leaver has links or watch links with; `bytes_moved` is what a joiner has copied so far.
    """

    number: int
    peers: tuple[int, ...] = ()
    bytes_moved: int = 0
    why: str = ""


class MoveCommitted(_Said, frozen=True, tag=True):
    """A leaver has seen the vote pass at the boundary of `version`: everybody else has installed `generation`."""

    number: int
    generation: int
    version: int


class MoveRefused(_Said, frozen=True, tag=True):
    """A leaver has seen the vote fail at the boundary of `version`: training goes on with it. `failed` counts the votes
    about the move that it has seen fail."""

    number: int
    version: int
    why: str
    failed: int = 1


class MoveTaken(_Said, frozen=True, tag=True):
    """A joiner holds `version` and has its rank. `parts`: what the pause consisted of, by name, seconds; or bytes.

    Names: `last_update_s`, `check_s`, `copy_s`, `bytes` (copied inside the pause), and others that the joiner knows.
    """

    number: int
    version: int
    parts: dict[str, float] = {}


class AskAddress(_Said, frozen=True, tag=True):
    """A member needs to reach `rank`, whose member has changed. Answer: `TakeAddress`."""

    rank: int


MoveFact = MovePrepared | MoveCommitted | MoveRefused | MoveTaken | AskAddress
MoveOrder = PrepareMove | CommitMove | CancelMove | ReleaseMember | TakeAddress
