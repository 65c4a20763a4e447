"""What holds one job wherever its agents are: run directory, journal, the machine's shell, drills, the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from keepstep import __version__
from keepstep.control.drilling import parse_start_drill
from keepstep.control.job_state import Directed, JobSpec, StopRequest
from keepstep.control.outcome import final_weights
from keepstep.control.roster import live, standbys
from keepstep.errors import KeepstepError, StoreError, UsageError
from keepstep.fleet.report import RunReport, report_text, summarise
from keepstep.records.events import JobEnded, JobStarted, StepProgress
from keepstep.records.messages import Fact
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.control_socket import serve_control
from keepstep.service.controller import JobShell
from keepstep.service.coverage_desk import CoverageDesk
from keepstep.service.domain_labels import domains_of_files
from keepstep.service.finding_desk import FindingDesk
from keepstep.service.keeper import Keeper
from keepstep.service.leadership import Leadership
from keepstep.service.output import Console
from keepstep.service.path_desk import PathDesk, read_traffic_file
from keepstep.service.progress import Standing
from keepstep.service.replaying import replay
from keepstep.service.reported_steps import ReportedSteps
from keepstep.service.run_directory import REPORT_FILE, STATE_FOLDER, RunDirectory, RunFacts
from keepstep.service.settings import Settings
from keepstep.service.stop_signals import STOPPED_BY, stopped_words
from keepstep.store.journal import Journal
from keepstep.store.state_file import FileStateStore

__all__ = ["JobHost", "JobPlan", "LeftJob", "job_name", "run_facts", "torch_version"]

_SAMPLE_S = 1.0
_log = logging.getLogger(__name__)


class JobPlan(msgspec.Struct, frozen=True):
    """One job: `script` with `arguments` on `nnodes` nodes, each with the settings' ranks and standbys.

    `drills` are faults to start with, each NAME:RANK; `labels` the domains of this node, each KIND=LABEL.
    """

    job: str
    script: str
    arguments: tuple[str, ...]
    nnodes: int
    settings: Settings
    drills: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def start_drills(self) -> dict[int, str]:
        """`drills` by rank. Raises UsageError for nonsense."""
        pairs = [parse_start_drill(text, world=self.world) for text in self.drills]
        if len({rank for _, rank in pairs}) < len(pairs):
            raise UsageError("two drills start the same rank", remedy="give each --drill another rank")
        return {rank: name for name, rank in pairs}

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.nnodes * self.settings.nproc_per_node


class LeftJob(msgspec.Struct, frozen=True):
    """What a controller that takes over must know besides the journal: the job as asked for, its data-plane secret in
    `spec`, where agents look for their controller, and the token file they prove themselves with."""

    plan: JobPlan
    spec: JobSpec
    host: str
    port: int
    token_file: str


def job_name(clock: Clock) -> str:
    """A new job's name: the second it began, and something unique."""
    return f"{int(clock.wall())}-{secrets.token_hex(3)}"


def torch_version() -> str:
    """The installed version of torch, found without importing it; empty if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return ""


class JobHost:
    """One job from `open()` to `finish()`. `send` delivers orders to agents."""

    def __init__(
        self,
        plan: JobPlan,
        send: Callable[[Directed], None],
        *,
        directory: RunDirectory,
        clock: Clock,
        console: Console,
        left: LeftJob | None = None,
    ) -> None:
        """Opens the journal in `directory`. `left` is what an earlier controller left of the job.

        Raises StoreError, and UsageError for a bad file of domains or a job that cannot be taken over."""
        self.plan = plan
        self.failed: KeepstepError | None = None
        self.interrupts = 0
        self._sampled = float("-inf")
        self._step = 0
        self._directory = directory
        self._clock = clock
        self._console = console
        self._journal = Journal.open(directory.path)
        self._keeper = Keeper(self._journal)
        self._control: asyncio.Server | None = None
        self.spec = spec = left.spec if left is not None else _new_spec(plan)
        holder = f"{platform.node()}:{os.getpid()}"
        self._leadership = Leadership(
            FileStateStore(directory.path / STATE_FOLDER), plan.job, holder=holder, clock=clock
        )
        replayed = None if left is None else replay(self._keeper.recall(), spec)
        self.shell = JobShell(
            spec, send, keeper=self._keeper, clock=clock, leadership=self._leadership, replayed=replayed
        )
        self.desk = FindingDesk(
            self.shell, self._keeper, plan=plan, directory=directory.path, clock=clock, console=console
        )
        self._reported = ReportedSteps()
        self.shell.steps = self._reported.steps
        self._paths: PathDesk | None = None
        self._pacing: asyncio.Task[None] | None = None
        self._coverage = CoverageDesk(self.shell, self._keeper, clock=clock)
        self._predicting: asyncio.Task[None] | None = None
        if plan.settings.traffic:
            file = read_traffic_file(Path(plan.settings.traffic))
            self._paths = PathDesk(self.shell, self._keeper, file=file, clock=clock, console=console)
        self.shell.watcher = self._watch
        self.shell.start_drills = plan.start_drills()

    async def open(self) -> None:
        """Take signals, listen for drills and make the run known. Raises EnvironmentProblem."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in STOPPED_BY:
            loop.add_signal_handler(number, self._on_signal, number)
        name = f"keepstep-run-{self.plan.job}-{secrets.token_hex(8)}"
        self._control = await serve_control(
            name, drill=self.shell.drill, probe=self.desk.probes.probe, move=self.shell.move
        )
        facts = run_facts(self.plan, created=self._clock.wall(), control=name)
        self._directory.publish(facts)
        if not self._keeper.events:
            self._keeper.keep(_started(facts), durable=True)
        self.shell.lead()
        self.desk.open()
        self._predicting = background(self._coverage.run())
        if self._paths is not None:
            self._pacing = background(self._paths.run())

    def _watch(self, fact: Fact, *, node: str, member: str) -> bool:
        """Everything that looks at facts before the machine does; True if one was nobody else's business."""
        state = self.shell.state
        self._coverage.take(fact)
        self._reported.take(fact, state)
        holder = state.members.get(member)
        if self._paths is not None and self._paths.take(fact, rank=-1 if holder is None else holder.rank):
            return True
        return self.desk.take(fact, node=node, member=member)

    async def close(self) -> None:
        """End the analysis, after a last look; to be awaited before `finish`."""
        for task in (self._pacing, self._predicting):
            if task is not None:
                task.cancel()
        await self.desk.close()

    def standing(self, *, loss: float | None = None, newest: bool = False) -> Standing:
        """How the job stands; with `newest` by the rank that is furthest: what it passed was agreed by all."""
        state = self.shell.state
        return Standing(
            phase=state.phase,
            step=(max if newest else min)(self.shell.steps().values(), default=0),
            loss=loss,
            members=len(live(state.members)),
            standbys=len(standbys(state.members)),
            findings=self.desk.book.words(),
        )

    def sample(self, standing: Standing) -> None:
        """Keep the progress in the journal, every second where it has changed."""
        now = self._clock.monotonic()
        if now - self._sampled >= _SAMPLE_S:
            self._sampled = now
            self._keep_progress(standing)

    def _keep_progress(self, standing: Standing) -> None:
        if standing.step == self._step:
            return
        self._step = standing.step
        self._keeper.keep(
            StepProgress(
                job=self.plan.job,
                wall=self._clock.wall(),
                step=standing.step,
                loss=standing.loss,
                members=standing.members,
                standbys=standing.standbys,
            )
        )

    def _on_signal(self, number: int) -> None:
        self.interrupts += 1
        self.shell.feed(StopRequest(128 + number, stopped_words(number)))
        if self.interrupts > 1:
            self.shell.done.set()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Anything unexpected in a callback ends the job instead of leaving it half alive."""
        error = context.get("exception")
        _log.error("internal error: %s", context.get("message"), exc_info=error)
        if self.failed is None:
            remedy = f"see {self._directory.logs / 'keepstep.jsonl'}"
            self.failed = KeepstepError(f"internal error: {error!r}", remedy=remedy)
            self.shell.done.set()

    async def outlook(self) -> RunReport:
        """The report that is to come, once all processes are gone: for those who must be told before it is written."""
        await self.desk.last_look()
        return summarise([*self._keeper.events, self._ended(self.standing(newest=True))])

    def finish(self, last: Standing | None = None) -> int:
        """Write the last records and the report, print the time line; the exit code of the job.

        `last` is how the job stood when its processes were gone, with the newest step that any of them showed.
        """
        if last is not None:
            self._keep_progress(last)
        if self._control is not None:
            self._control.close()
        ended = self._ended(last)
        code = ended.exit_code
        self._keeper.keep(ended, durable=True)
        for drill in self.shell.waiting_drills():
            self._console.say(f"keepstep: never happened: {drill}", error=True)
        for problem in (self._write_report(), self._close_journal()):
            if problem is not None:
                self._console.say(f"keepstep: {problem}", error=True)
                code = code or problem.exit_code
        return code

    def _ended(self, last: Standing | None) -> JobEnded:
        state = self.shell.state
        return JobEnded(
            job=self.plan.job,
            wall=self._clock.wall(),
            exit_code=self.failed.exit_code if self.failed else state.exit_code or 0,
            why=str(self.failed or state.exit_why),
            steps_kept=max(state.version, last.step if last else 0, 0),
            weights_sha256=final_weights(state),
        )

    def _write_report(self) -> StoreError | None:
        report = summarise(self._keeper.events)
        for line in report_text(report).splitlines():
            self._console.say(line, error=True)
        try:
            self._directory.write(REPORT_FILE, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        except StoreError as error:
            return error
        self._console.say(f"keepstep: report {self._directory.path / REPORT_FILE}", error=True)
        return None

    def _close_journal(self) -> StoreError | None:
        self._leadership.close()
        with contextlib.suppress(KeepstepError):
            self._journal.close()
        return self._keeper.problem


def _new_spec(plan: JobPlan) -> JobSpec:
    return JobSpec(
        job=plan.job,
        world=plan.world,
        nnodes=plan.nnodes,
        keepstep_version=__version__,
        secret=secrets.token_bytes(32),
        max_restarts=plan.settings.max_restarts,
        patience_s=plan.settings.patience_s,
        sandbox=plan.settings.sandbox,
        domains=domains_of_files(plan.settings.domains),
        shortage_s=plan.settings.shortage_s if plan.settings.on_shortage == "wait" else 0.0,
    )


def run_facts(plan: JobPlan, *, created: float, control: str) -> RunFacts:
    """What run.json says of `plan`; `control` is the socket that takes drills."""
    return RunFacts(
        job=plan.job,
        script=plan.script,
        arguments=plan.arguments,
        world=plan.world,
        standbys=plan.settings.standby * plan.nnodes,
        nodes=plan.nnodes,
        keepstep_version=__version__,
        python_version=platform.python_version(),
        torch_version=torch_version(),
        created=created,
        pid=os.getpid(),
        control=control,
    )


def _started(facts: RunFacts) -> JobStarted:
    return JobStarted(
        job=facts.job,
        wall=facts.created,
        script=facts.script,
        arguments=facts.arguments,
        world=facts.world,
        standbys=facts.standbys,
        keepstep_version=facts.keepstep_version,
        torch_version=facts.torch_version,
        python_version=facts.python_version,
    )
