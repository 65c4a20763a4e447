"""Hard evidence of a dead link (G-20): all links are made anew once, where another way may exist."""

from __future__ import annotations

import msgspec
import pytest
from test_job_shell import HELLO, StandingClock, shell_with

from keepstep.control.roster import Member, Status
from keepstep.records.events import Finding, Suspect
from keepstep.service.controller import JobShell
from keepstep.service.hang_desk import HangDesk
from keepstep.store.journal import MemoryJournal

DEAD = Finding(kind="communication_hang", suspects=((Suspect(link=(0, 1)),),))


def shell_of(*nodes: str, phase: str = "running") -> JobShell:
    shell, _ = shell_with(MemoryJournal(), lambda directed: None)
    shell.feed(HELLO, node="n1")
    members = {f"m{rank}": Member(f"m{rank}", rank, node, Status.RUNNING) for rank, node in enumerate(nodes)}
    shell.state = msgspec.structs.replace(shell.state, phase=phase, members=members, generation=0, change=None)
    return shell


def suspected_after(shell: JobShell, *, hard: bool = True, acts: bool = True) -> set[int]:
    desk = HangDesk(shell, acts=acts, clock=StandingClock())
    desk.note("hang:link:0>1", DEAD, hard=hard)
    desk.check({"hang:link:0>1": DEAD})
    return set(shell.state.suspected)


def test_links_are_made_anew_for_a_dead_one_between_nodes():
    assert suspected_after(shell_of("n1", "n2")) == {1}


@pytest.mark.parametrize(
    ("shell", "how"),
    [
        (shell_of("n1", "n1"), {}),
        (shell_of("n1", "n2"), {"hard": False}),
        (shell_of("n1", "n2"), {"acts": False}),
        (shell_of("n1", "n2", phase="changing"), {}),
    ],
    ids=["one-node", "not-hard", "observe", "first-step-of-a-change"],
)
def test_nothing_is_done_where_no_other_way_exists_or_nobody_asked(shell, how):
    assert suspected_after(shell, **how) == set()
