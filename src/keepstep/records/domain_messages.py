"""What is said about nodes as a whole: the domains they are in, that one is lost, what state came from which member."""

from __future__ import annotations

import msgspec

__all__ = ["NodeDomains", "NodeLost", "StateTaken"]


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
