"""How an agent of another node comes to a job, for the first time or back."""

from __future__ import annotations

import msgspec

__all__ = ["Assignment", "Enlist"]


class Enlist(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """First word of an agent on another node: it offers itself to `job` ("": the only one). Answer: `Assignment`.

    `orders` is the number of the last order that it got over an earlier link (-1: it is new). `agent` names the
    process: only the one that has a link may take another in its place.
    """

    node: str
    job: str
    keepstep_version: str
    orders: int = -1
    agent: str = ""


class Assignment(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """To an agent: what to run for `job`: `slots` ranks and `standbys` standbys of `script` with `arguments`.

    `facts` is the number of the agent's last fact that the controller has, where the agent comes back.
    """

    epoch: int
    job: str
    script: str
    arguments: tuple[str, ...]
    slots: int
    standbys: int
    max_restarts: int
    facts: int = 0
