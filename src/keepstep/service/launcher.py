"""`keepstep run`: controller and agent of one node in one process, from the first start to the report."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from pathlib import Path
from typing import Any

import msgspec

from keepstep import __version__
from keepstep.errors import EnvironmentProblem, UsageError
from keepstep.records.domain_messages import NodeDomains
from keepstep.records.messages import AgentHello
from keepstep.service.agent import Agent, AgentPlan
from keepstep.service.background import background
from keepstep.service.canary_run import Canary, run_canary
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.doctor import plane_library
from keepstep.service.domain_labels import labels_of_flags, labels_of_this_node
from keepstep.service.job_host import JobHost, JobPlan, job_name
from keepstep.service.logs import close_logs, open_logs
from keepstep.service.output import Console
from keepstep.service.ports import free_ports
from keepstep.service.progress import Progress, Standing
from keepstep.service.run_directory import RunDirectory
from keepstep.service.settings import Settings

__all__ = ["RunRequest", "checked_script", "needs_library", "run_job"]

_LOOK_S = 0.1
_MAX_SCRIPT_BYTES = 1024 * 1024
_IMPORTS_KEEPSTEP = re.compile(rb"^[ \t]*(?:import|from)\b[^\n#]*\bkeepstep\b", re.MULTILINE)


class RunRequest(msgspec.Struct, frozen=True):
    """What a person asked for. `directory` None: a new one under the settings' run_root. `drills` as in `JobPlan`,
    `labels` are the domains of this node, each KIND=LABEL; a `canary` runs before the job."""

    script: str
    arguments: tuple[str, ...]
    directory: Path | None
    settings: Settings
    drills: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    canary: Canary = Canary()


def checked_script(script: str) -> str:
    """`script` if it can be read. Raises UsageError otherwise."""
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such script"
        raise UsageError(what, where=script, remedy="give the path of a Python file; its own options come after it")
    if not os.access(path, os.R_OK):
        raise UsageError("script cannot be read", where=script, remedy="check its permissions")
    return script


def needs_library(script: str) -> None:
    """Raise EnvironmentProblem if `script` imports keepstep and the data plane library was not built."""
    with open(script, "rb") as file:
        imports = _IMPORTS_KEEPSTEP.search(file.read(_MAX_SCRIPT_BYTES))
    if imports and plane_library() is None:
        raise EnvironmentProblem(
            "the data plane library of keepstep is not built",
            where=script,
            remedy="install with a C compiler: `pip install .`, or `make setup` in the source tree",
        )


def run_job(request: RunRequest) -> int:
    """Run the job to its end; the exit code of the script, or 128 + signal. Raises KeepstepError before it starts."""
    needs_library(checked_script(request.script))
    clock = SystemClock()
    job = job_name(clock)
    settings = request.settings
    plan = JobPlan(job, request.script, request.arguments, 1, settings, request.drills, request.labels)
    plan.start_drills()
    labels_of_flags(request.labels)
    path = request.directory or Path(settings.run_root) / job

    def lead(small: JobPlan, folder: Path) -> int:
        return _lead(small, RunDirectory(folder, reserve_bytes=settings.reserve_bytes), clock=clock)

    if request.canary.ranks:
        directory = run_canary(plan, request.canary, path=path, lead=lead)
    else:
        directory = RunDirectory(path, reserve_bytes=settings.reserve_bytes)
    return _lead(plan, directory, clock=clock)


def _lead(plan: JobPlan, directory: RunDirectory, *, clock: Clock) -> int:
    """One job in its run directory, to its end; its exit code."""
    progress = Progress()
    console = Console(progress.write)
    try:
        open_logs(plan.settings.log_level, console=console, directory=directory.logs)
        console.say(f"keepstep: job {plan.job}, run directory {directory.path}", error=True)
        return asyncio.run(_Embedded(plan, directory, clock=clock, console=console).run(progress))
    finally:
        close_logs()
        console.close()
        progress.close()
        directory.close()


class _Embedded:
    """One job with its agent in this process: facts and orders are direct calls."""

    def __init__(self, plan: JobPlan, directory: RunDirectory, *, clock: Clock, console: Console) -> None:
        self.console = console
        self.settings = plan.settings
        self.node = platform.node() or "localhost"
        self.host = JobHost(
            plan, lambda d: self.agent.obey(d.member, d.order), directory=directory, clock=clock, console=console
        )
        self.agent = Agent(
            AgentPlan(plan.job, self.node, plan.script, plan.arguments, directory.path),
            lambda member, fact: self.host.shell.feed(fact, node=self.node, member=member),
            settings=plan.settings,
            clock=clock,
            console=console,
        )
        self.host.shell.steps = self.agent.steps

    async def run(self, progress: Progress) -> int:
        """From the first process to the report."""
        shell = self.host.shell
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self.host.open()
            await self.agent.open()
            tasks = [background(shell.tick()), background(self._show(progress))]
            ranks, warm = self.settings.nproc_per_node, self.settings.standby
            labels = labels_of_this_node(self.host.plan.labels)
            shell.feed(NodeDomains(self.node, labels), node=self.node)
            shell.feed(AgentHello(self.node, ranks, warm, __version__, ports=free_ports(1)), node=self.node)
            await shell.done.wait()
        finally:
            for task in tasks:
                task.cancel()
            await self.agent.close()
            await self.host.close()
        return self.host.finish(self._standing(newest=True))

    async def _show(self, progress: Progress) -> None:
        while True:
            standing = self._standing()
            if line := progress.show(standing):
                self.console.say(line, error=True)
            self.host.sample(standing)
            await asyncio.sleep(_LOOK_S)

    def _standing(self, *, newest: bool = False) -> Standing:
        first = next((m for m in self.agent.members.values() if m.rank == 0), None)
        return self.host.standing(loss=first.loss if first else None, newest=newest)
