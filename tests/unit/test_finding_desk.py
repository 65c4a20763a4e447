"""The desk of a job's findings: what a probe found is a finding of its own, whatever is told already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_job_shell import HELLO, StandingClock, shell_with

from keepstep.errors import UsageError
from keepstep.records.events import Finding, FindingKind, Suspect
from keepstep.records.messages import Address, Hello, MemberExited, MemberStarted, StateDigest
from keepstep.records.watch_messages import MismatchSaid, NodeProbed
from keepstep.service.analysis_wire import Standing
from keepstep.service.controller import JobShell
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


HANG = Finding(kind="noncommunication_hang", suspects=((Suspect(rank=1),),))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[tuple[FindingDesk, JobShell]]:
    shell, keeper = shell_with(MemoryJournal(), lambda directed: None)
    shell.feed(HELLO, node="n1")
    console = Console(lambda line, error: None)
    made = FindingDesk(shell, keeper, plan=Asked(), directory=tmp_path, clock=StandingClock(), console=console)
    yield made, shell
    asyncio.run(made.close())
    console.close()


def test_a_finding_that_has_ended_is_not_probed(desk) -> None:
    made, _ = desk
    made.book.enter(Standing("live:1", "new", HANG))
    made.book.end("live:1", "it moves")
    with pytest.raises(UsageError, match="finding 1 has ended"):
        asyncio.run(made.probes.probe(1))


def test_a_finding_that_ends_while_it_is_probed_is_not_narrowed(desk) -> None:
    made, _ = desk

    async def probed() -> None:
        answer = asyncio.ensure_future(made.probes.probe(1))
        await asyncio.sleep(0)
        made.book.end("live:1", "it moves")
        for rank in (0, 1):
            made.take(NodeProbed(1, rank, "n1", 0.0, note="in step()"), node="n1", member="")
        await answer

    made.book.enter(Standing("live:1", "new", HANG))
    with pytest.raises(UsageError, match=r"finding 1 ended while it was probed: .*in step\(\)"):
        asyncio.run(probed())
    assert made.book.open == {}


def test_what_plain_processes_showed_ends_when_all_start_again(desk) -> None:
    made, shell = desk
    made.book.enter(Standing("plain:noncommunication_hang", "new", HANG))
    assert not made.take(MismatchSaid("m0", 0, "Is there a mismatch?"), node="n1", member="m0")
    made.take(MismatchSaid("m1", 1, "Is there a mismatch?"), node="n1", member="m1")
    assert [finding.kind for finding in made.book.open.values()] == ["noncommunication_hang", "collective_mismatch"]
    assert made.book.open["said:mismatch"].suspects == ()
    made.analyst.after_look()
    assert len(made.book.open) == 2
    shell.state = msgspec.structs.replace(shell.state, attempt=1, phase="starting")
    made.analyst.after_look()
    assert made.book.open == {} and "started again" in made.book.numbered(1).evidence[-1]


def test_what_was_wrong_with_a_start_ends_when_all_have_joined(desk) -> None:
    made, shell = desk
    late = Finding(kind="startup_never_arrived", suspects=((Suspect(rank=1),),))
    made.book.enter(Standing("start:startup_never_arrived:1", "new", late))
    made.analyst.after_look()
    assert len(made.book.open) == 1
    shell.state = msgspec.structs.replace(shell.state, phase="running")
    made.analyst.after_look()
    assert made.book.open == {} and made.book.numbered(1).evidence == ("ended: all ranks have joined",)


@pytest.mark.parametrize("kind", ["compute_slow", "state_divergence"])
def test_the_end_of_a_process_that_was_slow_or_odd_is_a_finding_too(desk, kind) -> None:
    made, shell = desk
    made.book.enter(Standing("before", "new", Finding(kind=kind, suspects=((Suspect(rank=1),),))))
    name = next(member.name for member in shell.state.members.values() if member.rank == 1)
    made.take(MemberExited(name, 1, 0, 9), node="n1", member=name)
    made.take(MemberExited(name, 1, 0, 9), node="n1", member=name)
    assert [finding.kind for finding in made.book.open.values()] == [kind, "crash"]


def exited(shell: JobShell, signal: int) -> MemberExited:
    name = next(member.name for member in shell.state.members.values() if member.rank == 1)
    return MemberExited(name, 1, 0, signal, protected=False)


@pytest.mark.parametrize(("signal", "named"), [(9, True), (11, True), (6, False)])
def test_a_plain_rank_that_a_signal_ends_is_named_unless_a_library_may_have_ended_it(desk, signal, named) -> None:
    made, shell = desk
    fact = exited(shell, signal)
    made.take(fact, node="n1", member=fact.member)
    assert [f.suspects for f in made.book.open.values()] == ([((Suspect(rank=1),),)] if named else [])


def test_a_rank_that_dies_when_others_have_joined_is_a_start_that_failed(desk) -> None:
    made, shell = desk
    for rank in (0, 1):
        made.take(MemberStarted(f"m{rank}", rank, "n1", 1), node="n1", member="")
    made.take(Hello("m0", 0, 2, 1, Address("m0", "n1", "", "127.0.0.1", 1), "1", "2"), node="n1", member="m0")
    fact = exited(shell, 9)
    made.take(fact, node="n1", member=fact.member)
    (finding,) = made.book.open.values()
    assert (finding.kind, finding.suspects, finding.victims) == ("startup_died", ((Suspect(rank=1),),), (0,))


def test_links_of_a_script_without_our_lines_are_not_probed(desk) -> None:
    made, _ = desk
    stuck = Finding(kind="communication_hang", suspects=((Suspect(rank=0), Suspect(rank=1)),), next_probe="an echo")
    made.book.enter(Standing("plain:communication_hang", "new", stuck))
    with pytest.raises(UsageError, match=r"have not joined.*by hand: an echo"):
        asyncio.run(made.probes.probe(1))
