"""`keepstep run`: controller and agent of one node in one process, from the first start to the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import signal
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from keepstep.control.job_state import JobSpec, StopRequest
from keepstep.control.roster import live, standbys
from keepstep.errors import EnvironmentProblem, KeepstepError, UsageError
from keepstep.fleet.report import RunReport, report_text, summarise
from keepstep.records.events import JobEnded, JobStarted
from keepstep.records.messages import AgentHello
from keepstep.service.agent import Agent, AgentPlan
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.control_socket import serve_control
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.logs import close_logs, open_logs
from keepstep.service.output import Console
from keepstep.service.ports import free_ports
from keepstep.service.progress import Progress, Standing
from keepstep.service.run_directory import REPORT_FILE, RunDirectory, RunFacts
from keepstep.service.settings import Settings
from keepstep.store.journal import Journal

__all__ = ["RunRequest", "checked_script", "job_name", "run_job", "version_of"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_JOURNAL_CUT = 74
_ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunRequest(msgspec.Struct, frozen=True):
    """What a person asked for. `directory` None: a new one under the settings' run_root."""

    script: str
    arguments: tuple[str, ...]
    directory: Path | None
    settings: Settings


def checked_script(script: str) -> str:
    """`script` if it can be read. Raises UsageError otherwise."""
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such script"
        raise UsageError(what, where=script, remedy="give the path of a Python file; its own options come after it")
    if not os.access(path, os.R_OK):
        raise UsageError("script cannot be read", where=script, remedy="check its permissions")
    return script


def job_name(clock: Clock) -> str:
    """A new job's name: the second it began, and something unique."""
    return f"{int(clock.wall())}-{secrets.token_hex(3)}"


def version_of(distribution: str) -> str:
    """The installed version of a distribution, empty if it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def run_job(request: RunRequest) -> int:
    """Run the job to its end; the exit code of the script, or 128 + signal. Raises KeepstepError before it starts."""
    checked_script(request.script)
    clock = SystemClock()
    job = job_name(clock)
    path = request.directory or Path(request.settings.run_root) / job
    directory = RunDirectory(path, reserve_bytes=request.settings.reserve_bytes)
    progress = Progress()
    console = Console(progress.write)
    try:
        open_logs(request.settings.log_level, console=console, directory=directory.logs)
        console.say(f"keepstep: job {job}, run directory {path}", error=True)
        return asyncio.run(_Run(request, job, directory=directory, clock=clock, console=console).run(progress))
    finally:
        close_logs()
        console.close()
        progress.close()
        directory.close()


class _Run:
    """One embedded job: the shell, the agent, and what binds them."""

    def __init__(
        self, request: RunRequest, job: str, *, directory: RunDirectory, clock: Clock, console: Console
    ) -> None:
        self.request = request
        self.job = job
        self.directory = directory
        self.clock = clock
        self.console = console
        self.node = platform.node() or "localhost"
        self.fatal: KeepstepError | None = None
        self.signals = 0
        settings = request.settings
        self.journal = Journal.open(directory.path)
        self.keeper = Keeper(self.journal)
        spec = JobSpec(
            job=job,
            world=settings.nproc_per_node,
            nnodes=1,
            keepstep_version=version_of("keepstep"),
            secret=secrets.token_bytes(32),
            max_restarts=settings.max_restarts,
            patience_s=settings.patience_s,
        )
        self.shell = JobShell(spec, lambda d: self.agent.obey(d.member, d.order), keeper=self.keeper, clock=clock)
        plan = AgentPlan(job, self.node, request.script, request.arguments, directory.path)
        self.agent = Agent(
            plan,
            lambda member, fact: self.shell.feed(self.node, member, fact),
            settings=settings,
            clock=clock,
            console=console,
        )

    async def run(self, progress: Progress) -> int:
        """From the first process to the report."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in _ENDED_BY:
            loop.add_signal_handler(number, self._on_signal, number)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self._begin()
            tasks = [loop.create_task(self.shell.tick()), loop.create_task(self._show(progress))]
            await self.shell.done.wait()
        finally:
            for task in tasks:
                task.cancel()
            await self.agent.close()
        return self._finish()

    async def _begin(self) -> None:
        name = f"keepstep-run-{self.job}-{secrets.token_hex(8)}"
        await serve_control(name, self.shell.drill)
        await self.agent.open()
        settings, script = self.request.settings, self.request.script
        facts = RunFacts(
            job=self.job,
            script=script,
            arguments=self.request.arguments,
            world=settings.nproc_per_node,
            standbys=settings.standby,
            nodes=1,
            keepstep_version=version_of("keepstep"),
            python_version=platform.python_version(),
            torch_version=version_of("torch"),
            created=self.clock.wall(),
            pid=os.getpid(),
            control=name,
        )
        self.directory.publish(facts)
        self.keeper.keep(
            JobStarted(
                job=self.job,
                wall=facts.created,
                script=script,
                arguments=facts.arguments,
                world=facts.world,
                standbys=facts.standbys,
                nodes=(self.node,),
                keepstep_version=facts.keepstep_version,
                torch_version=facts.torch_version,
                python_version=facts.python_version,
            ),
            durable=True,
        )
        hello = AgentHello(
            self.node, settings.nproc_per_node, settings.standby, facts.keepstep_version, ports=free_ports(1)
        )
        self.shell.feed(self.node, "", hello)

    def _on_signal(self, number: int) -> None:
        self.signals += 1
        if self.signals > 1:
            for member in tuple(self.agent.members.values()):
                member.process.send(signal.SIGKILL)
        name = signal.Signals(number).name
        self.shell.feed("", "", StopRequest(128 + number, f"stopped by {name}"))

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Anything unexpected in a callback ends the job instead of leaving it half alive."""
        error = context.get("exception")
        _log.error("internal error: %s", context.get("message"), exc_info=error)
        if self.fatal is None:
            self.fatal = KeepstepError(f"internal error: {error!r}", remedy=f"see {self.directory.logs}/keepstep.jsonl")
            self.shell.done.set()

    async def _show(self, progress: Progress) -> None:
        while True:
            if line := progress.show(self._standing()):
                self.console.say(line, error=True)
            await asyncio.sleep(_LOOK_S)

    def _standing(self) -> Standing:
        members = self.shell.state.members
        steps = self.agent.steps()
        first = next((m for m in self.agent.members.values() if m.rank == 0), None)
        return Standing(
            phase=self.shell.state.phase,
            step=min(steps.values(), default=0),
            loss=first.loss if first else None,
            members=len(live(members)),
            standbys=len(standbys(members)),
        )

    def _finish(self) -> int:
        """Write the last record and the report, print the time line; the exit code."""
        state = self.shell.state
        code = 70 if self.fatal else state.exit_code or 0
        weights = next((m.weights_sha256 for m in state.members.values() if m.weights_sha256), "")
        self.keeper.keep(
            JobEnded(
                job=self.job,
                wall=self.clock.wall(),
                exit_code=code,
                why=str(self.fatal or state.exit_why),
                steps_kept=max(state.version, 0),
                weights_sha256=weights,
            ),
            durable=True,
        )
        report = summarise(self.keeper.events)
        self._say_report(report)
        try:
            self.directory.write(REPORT_FILE, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        except EnvironmentProblem as error:
            self.console.say(f"keepstep: {error}", error=True)
            code = code or error.exit_code
        with contextlib.suppress(KeepstepError):
            self.journal.close()
        if self.keeper.lost and not code:
            self.console.say(f"keepstep: {self.keeper.lost} records are not in the journal", error=True)
            code = _JOURNAL_CUT
        return code

    def _say_report(self, report: RunReport) -> None:
        for line in report_text(report).splitlines():
            self.console.say(line, error=True)
        self.console.say(f"keepstep: report {self.directory.path / REPORT_FILE}", error=True)
