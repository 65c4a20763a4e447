"""What agents and the controller say about nodes as a whole: the domains they are in, and that one is lost."""

from __future__ import annotations

import msgspec

__all__ = ["NodeDomains", "NodeLost"]


class NodeDomains(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """An agent tells the failure domains of its `node`: a label for each kind. Said before `AgentHello`."""

    node: str
    labels: dict[str, str] = {}


class NodeLost(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """The agent of `node` is gone, and with it all its processes: they are lost together."""

    node: str
    why: str
