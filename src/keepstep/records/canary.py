"""Canaries: a job that runs small and short before it gets all its ranks. Its name says so to all who have to know."""

from __future__ import annotations

import re

import msgspec

__all__ = ["CanaryLoss", "canary_name", "canary_steps", "name_without_canary"]

_NAME = re.compile(r"^(?P<job>.*)-canary-(?P<steps>[1-9][0-9]{0,8})$", re.DOTALL)


def canary_name(job: str, steps: int) -> str:
    """The name of the canary of `job` that ends after `steps` steps."""
    return f"{job}-canary-{steps}"


def canary_steps(name: str) -> int:
    """After how many steps the job of that name ends because it is a canary; 0 for any other."""
    found = _NAME.match(name)
    return int(found["steps"]) if found else 0


def name_without_canary(name: str) -> str:
    """The name of the job that a canary belongs to; any other name as it is."""
    found = _NAME.match(name)
    return found["job"] if found else name


class CanaryLoss(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """An agent saw that a member of a canary printed a `loss` that is no finite number; the line is in its `log`."""

    member: str
    rank: int
    loss: str
    log: str
