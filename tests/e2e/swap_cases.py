"""The generated list of failures inside a swap: who is killed at which phase of it.

Rank 2 of four is killed; at a phase of the repair one process stands still and the victims are killed. Ranks 0 and 2
are replicas of each other in HSDP (as all are in DDP); 0 is the source of the joiner's state.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["LAYOUTS", "Case", "every_case", "some_cases"]

LAYOUTS = ("ddp", "hsdp")
LOST = 2
REPLICA, OTHER = "0", "3"
STAYER_PHASES = ("abort", "parked", "settle", "settled", "serving", "go", "installed")
JOINER_PHASES = ("welcome", "ready", "fetch", "fetched", "go", "installed")
STAYER_VICTIMS = ((REPLICA,), (OTHER,), ("joiner",), ("standby",), (REPLICA, OTHER), ("joiner", OTHER))
JOINER_VICTIMS = (("joiner",), (REPLICA,), (OTHER,), ("standby",), ("joiner", REPLICA))


class Case(NamedTuple):
    """`holder` (a rank, or "joiner") stands still at `phase` while `victims` are killed."""

    phase: str
    holder: str
    victims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.phase}@{self.holder} kills {'+'.join(self.victims)}"


def every_case() -> list[Case]:
    """All of them, in an order in which neighbours differ in their phase."""
    stayers = [Case(phase, REPLICA, who) for who, phase in itertools.product(STAYER_VICTIMS, STAYER_PHASES)]
    joiners = [Case(phase, "joiner", who) for who, phase in itertools.product(JOINER_VICTIMS, JOINER_PHASES)]
    return stayers + joiners


def some_cases(count: int, *, skip: int = 0) -> list[Case]:
    """`count` of them, spread evenly over the list; `skip` moves the choice, so that layouts differ."""
    everything = every_case()
    return [everything[(number * len(everything) // count + skip) % len(everything)] for number in range(count)]
