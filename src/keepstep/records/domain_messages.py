"""What is said about nodes as a whole: the domains they are in, that one is lost, what state came from which member."""

from __future__ import annotations

import msgspec

__all__ = ["CheckpointWritten", "NodeDomains", "NodeFact", "NodeLost", "StateFact", "StateKept", "StateTaken"]


class NodeDomains(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """An agent tells the failure domains of its `node`: a label for each kind. Said before `AgentHello`."""

    node: str
    labels: dict[str, str] = {}


class NodeLost(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """The agent of `node` is gone, and with it all its processes: they are lost together."""

    node: str
    why: str


class StateTaken(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """A joiner of `rank` has taken state: how many bytes each source (a rank) gave. All gave as fast as they could."""

    generation: int
    rank: int
    by_source: dict[int, int]


class StateKept(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """In passing, in a new generation: `rank` holds the state `replica`, and `mirrored` says that copies of it go to
    another member from now on."""

    generation: int
    rank: int
    replica: str
    mirrored: bool


class CheckpointWritten(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """In passing: the part of `rank` of the checkpoint after `version` updates is whole on the disk."""

    rank: int
    version: int


NodeFact = NodeDomains | NodeLost
StateFact = StateTaken | StateKept | CheckpointWritten
