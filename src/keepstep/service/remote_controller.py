"""`keepstep controller`: one job whose agents come from other nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from keepstep.records.canary import canary_steps
from keepstep.records.messages import Assignment
from keepstep.service.background import background
from keepstep.service.canary_run import Canary, last_word, not_a_canary, run_canary
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.job_host import JobHost, JobPlan, LeftJob, job_name
from keepstep.service.launcher import RunRequest, checked_script
from keepstep.service.left_job import keep_left, read_left
from keepstep.service.logs import close_logs, open_logs
from keepstep.service.output import Console
from keepstep.service.ports import free_ports
from keepstep.service.registry import Registry
from keepstep.service.run_directory import TOKEN_FILE, RunDirectory
from keepstep.service.token import make_token
from keepstep.store.remote import serve_remote

__all__ = ["Listening", "run_controller", "take_over"]

_LOOK_S = 1.0


class Listening(msgspec.Struct, frozen=True):
    """Where the controller listens, for how many nodes, and the job's name (empty: a new one)."""

    host: str
    port: int
    nnodes: int
    job: str = ""


def run_controller(request: RunRequest, listening: Listening) -> int:
    """Serve the job to its end; its exit code. Raises KeepstepError before it starts (a port in use, for one)."""
    checked_script(request.script)
    clock = SystemClock()
    settings = request.settings
    job = listening.job or job_name(clock)
    plan = JobPlan(job, request.script, request.arguments, listening.nnodes, settings, request.drills)
    plan.start_drills()
    path = request.directory or Path(settings.run_root) / job
    not_a_canary(job)
    if request.canary.ranks:
        listening, directory = _canary_first(plan, request.canary, listening=listening, path=path, clock=clock)
    else:
        directory = RunDirectory(path, reserve_bytes=settings.reserve_bytes)
    return _lead(plan, listening, directory=directory, clock=clock)


def _canary_first(
    plan: JobPlan, canary: Canary, *, listening: Listening, path: Path, clock: Clock
) -> tuple[Listening, RunDirectory]:
    """Run the canary on the first agents that come; they come back for the job, to the port that is returned with the
    run directory, which is held from before the canary on."""
    port = listening.port or free_ports(1)[0]
    listening = msgspec.structs.replace(listening, port=port)

    def lead(small: JobPlan, folder: Path) -> int:
        directory = RunDirectory(folder, reserve_bytes=small.settings.reserve_bytes)
        token = small.settings.token_file or str(path / TOKEN_FILE)
        settings = msgspec.structs.replace(small.settings, token_file=token)
        small = msgspec.structs.replace(small, settings=settings)
        return _lead(small, listening, directory=directory, clock=clock)

    return listening, run_canary(plan, canary, path=path, lead=lead)


def take_over(path: Path) -> int:
    """Go on with the job in `path`, whose controller is gone, to its end; its exit code.

    Raises UsageError where there is no such job, it is over, or its controller lives.
    """
    left = read_left(path)
    directory = RunDirectory(path, reserve_bytes=left.plan.settings.reserve_bytes, take_over=True)
    listening = Listening(left.host, left.port, left.plan.nnodes, left.plan.job)
    return _lead(left.plan, listening, directory=directory, clock=SystemClock(), left=left)


def _lead(
    plan: JobPlan, listening: Listening, *, directory: RunDirectory, clock: Clock, left: LeftJob | None = None
) -> int:
    settings = plan.settings
    console = Console()
    try:
        open_logs(settings.log_level, console=console, directory=directory.logs)
        file = settings.token_file or (left.token_file if left else "") or str(directory.path / TOKEN_FILE)
        token = make_token(Path(file))
        serving = _Serving(plan, listening, directory=directory, clock=clock, console=console, left=left)
        return asyncio.run(serving.run(token, file))
    finally:
        close_logs()
        console.close()
        directory.close()


class _Serving:
    """One job whose agents come over the network."""

    def __init__(
        self,
        plan: JobPlan,
        listening: Listening,
        *,
        directory: RunDirectory,
        clock: Clock,
        console: Console,
        left: LeftJob | None,
    ) -> None:
        self._plan, self._listening, self._left = plan, listening, left
        self._directory, self._clock, self._console = directory, clock, console
        self._registry = Registry()

    async def run(self, token: str, token_file: str) -> int:
        """To the end of the job."""
        plan, registry = self._plan, self._registry
        host = JobHost(
            plan,
            lambda d: registry.send(plan.job, d),
            directory=self._directory,
            clock=self._clock,
            console=self._console,
            left=self._left,
        )
        awaited = registry.add(host.shell, _assignment(plan, host.shell.state.epoch))
        server = await serve_remote(
            self._listening.host,
            self._listening.port,
            token=token,
            on_peer=registry.attend,
            silence_s=plan.settings.silence_s,
        )
        try:
            keep_left(self._directory, LeftJob(plan, host.spec, self._listening.host, server.port, token_file))
            await host.open()
            self._announce(server.port, len(awaited))
            tasks = [background(host.shell.tick()), background(self._sample(host)), background(self._give_up())]
            await host.shell.done.wait()
            for task in tasks:
                task.cancel()
            code, why = host.shell.state.exit_code or 0, host.shell.state.exit_why
            if canary_steps(plan.job):
                code, why = last_word(await host.outlook(), plan.job)
            await registry.dismiss(plan.job, code=code, why=why)
        finally:
            await server.close()
            await host.close()
        return host.finish(host.standing(newest=True))

    def _announce(self, port: int, awaited: int) -> None:
        job, where = self._plan.job, f"{self._listening.host}:{port}"
        what = f"job {job} waits for {self._plan.nnodes} agents at {where}"
        if self._left is not None:
            what = f"job {job} is taken over at {where}; {awaited} agents are to come back"
        self._console.say(f"keepstep: {what}, run directory {self._directory.path}", error=True)

    async def _sample(self, host: JobHost) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            host.sample(host.standing())

    async def _give_up(self) -> None:
        """Agents of an earlier controller that do not come back in time are gone."""
        await asyncio.sleep(self._plan.settings.controller_patience_s)
        self._registry.give_up(self._plan.job)


def _assignment(plan: JobPlan, epoch: int) -> Assignment:
    return Assignment(
        epoch=epoch,
        job=plan.job,
        script=plan.script,
        arguments=plan.arguments,
        slots=plan.settings.nproc_per_node,
        standbys=plan.settings.standby,
        max_restarts=plan.settings.max_restarts,
    )
