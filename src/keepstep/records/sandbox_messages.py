"""What controller, agents and processes say to each other about the warm-up of standbys in a sandbox.

A *role kind* is a set of ranks that do the same work: equal shapes of parameters and equal collectives in a step.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "MOST_KINDS",
    "KeepRecording",
    "RecordStep",
    "RecordingKept",
    "RoleKind",
    "RoleSeen",
    "SandboxFact",
    "SandboxOrder",
    "WarmUp",
    "WarmedUp",
]

MOST_KINDS = 3
"""Role kinds that one standby warms at most: first, middle and last stage."""


class RoleKind(msgspec.Struct, frozen=True):
    """A kind by its `name` (hex), the `ranks` that are of it, and the one of them whose recording stands for all.

    `memory_bytes` is what that rank's process needed at most. It was `local_rank` of the `local_world` ranks of its
    node, which was number `node_rank`.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    memory_bytes: int = 0
    local_rank: int = 0
    local_world: int = 1
    node_rank: int = 0


class RoleSeen(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """A member has recorded its first steps: `name` of its role kind, peak memory, bytes recorded, seconds it took.

    `on_device`: it computes on something else than the CPU, so no standby rehearses its kind.
    """

    rank: int
    name: str
    memory_bytes: int
    recorded_bytes: int
    cost_s: float = 0.0
    on_device: bool = False


class RecordingKept(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """A member wrote the recording of role kind `name`, or says `why` not."""

    rank: int
    name: str
    why: str = ""


class WarmedUp(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """A standby has rehearsed the role kinds `names` and waits again; `why` says what it could not do.

    `seconds` from the order on; `kept_code` says that compiled code is still hot for every rank.
    """

    names: tuple[str, ...]
    seconds: float = 0.0
    why: str = ""
    kept_code: bool = True


class RecordStep(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """To a member before its `Welcome`: record what the collectives of the first steps give. Answer: `RoleSeen`."""

    epoch: int


class KeepRecording(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """To a member: write its recording (`keep`; answer: `RecordingKept`) or forget it. The agent adds `directory`."""

    epoch: int
    keep: bool
    directory: str = ""


class WarmUp(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """To a standby: rehearse these role kinds in this order, the last one stays hot. Answer: `WarmedUp`.

    The agent adds the `directory` with the recordings.
    """

    epoch: int
    kinds: tuple[RoleKind, ...]
    world: int
    directory: str = ""


SandboxFact = RoleSeen | RecordingKept | WarmedUp
SandboxOrder = RecordStep | KeepRecording | WarmUp
