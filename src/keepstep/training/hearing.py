"""Who listens to the collectives of this process, or answers them in place of its fabric."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.training.replay import Replay
from keepstep.training.tape import Tape

__all__ = ["HEARING", "Hearing"]


@dataclass
class Hearing:
    """`tape` records live collectives (None: nobody does), `replay` answers those of LOCAL mode (None: as if all other
    members had given the same)."""

    tape: Tape | None = None
    replay: Replay | None = None


HEARING = Hearing()
"""That of this process."""
