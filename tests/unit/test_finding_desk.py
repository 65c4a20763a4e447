"""The desk of a job's findings: what a probe found is a finding of its own, whatever is told already."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from test_job_shell import HELLO, StandingClock, shell_with

from keepstep.records.events import Finding, FindingKind, Suspect
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
