"""The values of a planned move on its way."""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = ["Heir", "Move", "MovePhase"]


class MovePhase(Enum):
    """FINDING joiners and warming them up, asking LEAVERS, PREPARING everybody, COMMITTING until the first step."""

    FINDING = "finding"
    LEAVERS = "leavers"
    PREPARING = "preparing"
    COMMITTING = "committing"


class Heir(msgspec.Struct, frozen=True):
    """One rank of a move: from process `leaver` on `origin` to process `joiner` ("": not chosen yet) on `node`."""

    rank: int
    leaver: str
    origin: str
    node: str
    joiner: str = ""


class Move(msgspec.Struct, frozen=True):
    """A move from the request to the joiners' first step. All sets hold names of processes.

    `generation` is what everybody installs at its commit, `before` the one that all are in until then. `asked` were
    told to prepare, `prepared` have, `peers` are the ranks that leavers have links with; `refused` leavers saw the
    present vote fail, which was tried `tries` times; `committed` leavers saw it pass, `taken` joiners hold the state,
    `stepped` ones made a step. `marks` says when what was reached first (wall clock), `pauses` what each joiner
    counted, `moved` when the last answer came.
    """

    number: int
    generation: int
    heirs: tuple[Heir, ...]
    begun: float
    moved: float
    before: int = 0
    phase: MovePhase = MovePhase.FINDING
    asked: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    peers: frozenset[int] = frozenset()
    refused: frozenset[str] = frozenset()
    tries: int = 1
    committed: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    stepped: frozenset[str] = frozenset()
    version: int = -1
    bytes_moved: int = 0
    marks: dict[str, float] = {}
    pauses: tuple[dict[str, float], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that move, in order."""
        return tuple(heir.rank for heir in self.heirs)

    @property
    def leavers(self) -> frozenset[str]:
        """The processes that give their ranks up."""
        return frozenset(heir.leaver for heir in self.heirs)

    @property
    def joiners(self) -> frozenset[str]:
        """The processes that were chosen to take them."""
        return frozenset(heir.joiner for heir in self.heirs if heir.joiner)

    @property
    def committing(self) -> bool:
        """True once a leaver may have committed: from here on only a membership change undoes it."""
        return self.phase is MovePhase.COMMITTING
