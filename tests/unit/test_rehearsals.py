"""What a standby says of rehearsals that it could not make."""

from __future__ import annotations

from pathlib import Path

from keepstep.records.messages import Fact
from keepstep.records.sandbox_messages import RoleKind, WarmedUp, WarmUp
from keepstep.training.rehearsals import Rehearsals


class LinkTwin:
    """Takes what the standby says; nothing else is wanted of it."""

    def __init__(self) -> None:
        self.said: list[Fact] = []

    def pending(self) -> bool:
        return False

    def say(self, fact: Fact) -> None:
        self.said.append(fact)


def test_a_standby_on_a_node_without_recordings_says_once_why_it_does_not_rehearse(tmp_path: Path) -> None:
    link = LinkTwin()
    rehearsals = Rehearsals(link, now=lambda: 0.0)
    kinds = (RoleKind("a", 0, (0,)), RoleKind("c", 3, (3,)), RoleKind("b", 1, (1, 2)))
    rehearsals.take(WarmUp(1, kinds, 4, str(tmp_path / "sandbox")))
    assert rehearsals.next() is None
    (said,) = link.said
    assert isinstance(said, WarmedUp) and said.names == ()
    assert said.why.startswith("no recording of a role like that of rank 0, 1, 3 is on this node: ")
    assert "No such file" not in said.why and str(tmp_path) not in said.why
