"""How far plans are trusted: advice only, then jobs of low priority, then large jobs whose traffic is known."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.records.demand import Demand

__all__ = ["STAGES", "Stage", "StagePolicy", "admitted"]

Stage = Literal["advise", "low_priority", "large_known"]
STAGES: tuple[Stage, ...] = ("advise", "low_priority", "large_known")


class StagePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stage in force, and where its lines are: jobs up to `low_priority`, jobs from `large_ranks` ranks on."""

    stage: Stage = "advise"
    low_priority: int = 0
    large_ranks: int = 64


def admitted(demand: Demand, policy: StagePolicy) -> tuple[bool, str]:
    """Whether the plan of this job is put in force at the stage, and why (not). Every later stage admits more."""
    if policy.stage == "advise":
        return False, "stage advise: nothing is put in force"
    if demand.priority <= policy.low_priority:
        return True, f"priority {demand.priority} is at most {policy.low_priority}"
    if policy.stage == "low_priority":
        return False, f"stage low_priority: priority {demand.priority} is above {policy.low_priority}"
    if not demand.known:
        return False, "stage large_known: the job's traffic is not known in advance"
    if len(demand.seats) < policy.large_ranks:
        return False, f"stage large_known: {len(demand.seats)} ranks are fewer than {policy.large_ranks}"
    return True, f"{len(demand.seats)} ranks, known traffic"
