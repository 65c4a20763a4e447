"""What the parts of a planned move need of the member they belong to."""

from __future__ import annotations

from typing import Protocol

from keepstep.control.member import MemberState
from keepstep.training.data import Batches
from keepstep.training.state import TrackedState

__all__ = ["Seat"]


class Seat(Protocol):
    """The member whose rank moves, or stays (`Guard`)."""

    state: MemberState
    streams: list[Batches]
    replicas: dict[int, str]
    full: bool
    agreed: bool
    tracked: TrackedState | None

    def check_rehearsal(self) -> None:
        """Raises StateError if a joiner that stands here could not make a member's next step."""

    def publish(self, version: int, *, counting: bool) -> None:
        """Leave the rank's own state where it survives this process."""
