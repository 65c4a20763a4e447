"""Orders to nodes, and facts from one, numbered and kept for a while: a link that is made anew loses none of them."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

from keepstep.control.job_state import Directed
from keepstep.errors import MembershipError

__all__ = ["MOST_KEPT", "Outboxes", "newer"]

_Message = TypeVar("_Message")

MOST_KEPT = 4096
"""So many numbered messages are kept for the other side to ask for again."""


class Outboxes:
    """The newest orders of every node."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Directed]] = {}

    def numbered(self, directed: Directed) -> Directed:
        """`directed` with the next number of its node, kept; one that has a number already keeps it."""
        kept = self._kept.setdefault(directed.node, deque(maxlen=MOST_KEPT))
        if not directed.number:
            directed = msgspec.structs.replace(directed, number=kept[-1].number + 1 if kept else 1)
        kept.append(directed)
        return directed

    def after(self, node: str, number: int) -> list[Directed]:
        """The orders to `node` behind `number`. Raises MembershipError if some of them are not kept any more."""
        kept = self._kept.get(node, deque())
        return newer([(directed.number, directed) for directed in kept], number)


def newer(kept: list[tuple[int, _Message]], number: int) -> list[_Message]:
    """Those of `kept`, by number in order, behind `number`. Raises MembershipError where there is a gap."""
    behind = [one for one in kept if one[0] > number]
    if behind and behind[0][0] != number + 1:
        raise MembershipError(
            f"what came between number {number} and {behind[0][0]} is not kept any more",
            remedy="this node was away for too long: start the job again",
        )
    return [message for _, message in behind]
