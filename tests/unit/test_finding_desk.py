"""The desk of a job's findings: what a probe found is a finding of its own, whatever is told already."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from test_job_shell import HELLO, StandingClock, shell_with

from keepstep.records.events import Finding, FindingKind, Suspect
from keepstep.records.messages import StateDigest
from keepstep.records.watch_messages import NodeProbed
from keepstep.service.analysis_wire import Standing
from keepstep.service.finding_desk import FindingDesk
from keepstep.service.output import Console
from keepstep.service.settings import Settings
from keepstep.store.journal import MemoryJournal


class Asked(msgspec.Struct):
    """A plan."""

    script: str = "train.py"
    arguments: tuple[str, ...] = ()
    settings: Settings = Settings(on_hang="observe")


@pytest.mark.parametrize(
    ("key", "kind"),
    [("calls:g", "collective_mismatch"), ("still:m1", "noncommunication_hang"), ("live:1", "noncommunication_hang")],
)
def test_a_finding_that_was_told_in_other_words_can_be_probed(tmp_path: Path, key: str, kind: FindingKind):
    async def probed() -> str:
        shell, keeper = shell_with(MemoryJournal(), lambda directed: None)
        shell.feed(HELLO, node="n1")
        console = Console(lambda line, error: None)
        desk = FindingDesk(shell, keeper, plan=Asked(), directory=tmp_path, clock=StandingClock(), console=console)
        desk.book.enter(Standing(key, "new", Finding(kind=kind, suspects=((Suspect(rank=1),),))))
        answer = asyncio.ensure_future(desk.probes.probe(1))
        await asyncio.sleep(0)
        for rank in (0, 1):
            desk.take(NodeProbed(1, rank, "n1", 0.0, note="in step()"), node="n1", member="")
        said = await answer
        await desk.close()
        console.close()
        return said

    assert asyncio.run(probed()).startswith(f"finding 2 (narrows 1): {kind}, rank 1")


def test_a_link_of_a_stopped_process_is_not_told_beside_it(tmp_path: Path):
    async def told() -> list[str]:
        shell, keeper = shell_with(MemoryJournal(), lambda directed: None)
        console = Console(lambda line, error: None)
        desk = FindingDesk(shell, keeper, plan=Asked(), directory=tmp_path, clock=StandingClock(), console=console)
        desk.book.enter(
            Standing("still:m1", "new", Finding(kind="noncommunication_hang", suspects=((Suspect(rank=1),),)))
        )
        for link in ((1, 2), (5, 6)):
            dead = Finding(kind="communication_hang", suspects=((Suspect(link=link),),))
            desk._on_change(Standing(f"hang:link:{link}", "new", dead))
        await desk.close()
        console.close()
        return list(desk.book.open)

    assert asyncio.run(told()) == ["still:m1", "hang:link:(5, 6)"]


def test_a_finding_about_processes_of_an_earlier_attempt_ends_with_it(tmp_path: Path):
    """Else it would hide every later one of its kind."""

    async def told() -> tuple[list[str], list[str]]:
        shell, keeper = shell_with(MemoryJournal(), lambda directed: None)
        console = Console(lambda line, error: None)
        desk = FindingDesk(shell, keeper, plan=Asked(), directory=tmp_path, clock=StandingClock(), console=console)
        for key, kind in (("calls:0", "collective_mismatch"), ("checkpoint:c", "state_divergence")):
            desk.book.enter(Standing(key, "new", Finding(kind=kind, suspects=((Suspect(rank=1),),))))
        shell.state = msgspec.structs.replace(shell.state, attempt=1, phase="restarting")
        desk._look_after()
        during = list(desk.book.open)
        shell.state = msgspec.structs.replace(shell.state, phase="running")
        desk._look_after()
        await desk.close()
        console.close()
        return during, list(desk.book.open)

    assert asyncio.run(told()) == (["calls:0", "checkpoint:c"], ["checkpoint:c"])


def test_replicas_are_not_compared_with_what_an_earlier_attempt_said(tmp_path: Path):
    async def told() -> list[str]:
        shell, keeper = shell_with(MemoryJournal(), lambda directed: None)
        console = Console(lambda line, error: None)
        desk = FindingDesk(shell, keeper, plan=Asked(), directory=tmp_path, clock=StandingClock(), console=console)
        for rank in (0, 1):
            desk.take(StateDigest(rank, 1, "a", "r"), node="n1", member="")
            desk.take(StateDigest(rank, 2, "a", "r"), node="n1", member="")
        shell.state = msgspec.structs.replace(shell.state, attempt=1, phase="running")
        desk.take(StateDigest(0, 2, "b", "r"), node="n1", member="")
        await desk.close()
        console.close()
        return list(desk.book.open)

    assert asyncio.run(told()) == []
