"""`keepstep controller`: one job whose agents come from other nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from keepstep.records.messages import Assignment
from keepstep.service.background import background
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.job_host import JobHost, JobPlan, job_name
from keepstep.service.launcher import RunRequest, checked_script
from keepstep.service.logs import close_logs, open_logs
from keepstep.service.output import Console
from keepstep.service.registry import Registry
from keepstep.service.run_directory import TOKEN_FILE, RunDirectory
from keepstep.service.token import make_token
from keepstep.store.remote import serve_remote

__all__ = ["Listening", "run_controller"]


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
    directory = RunDirectory(path, reserve_bytes=settings.reserve_bytes)
    console = Console()
    try:
        open_logs(settings.log_level, console=console, directory=directory.logs)
        token = make_token(Path(settings.token_file) if settings.token_file else path / TOKEN_FILE)
        return asyncio.run(_serve(plan, listening, directory=directory, clock=clock, console=console, token=token))
    finally:
        close_logs()
        console.close()
        directory.close()


async def _serve(
    plan: JobPlan, listening: Listening, *, directory: RunDirectory, clock: Clock, console: Console, token: str
) -> int:
    registry = Registry()
    host = JobHost(plan, lambda d: registry.send(plan.job, d), directory=directory, clock=clock, console=console)
    settings = plan.settings
    assignment = Assignment(
        epoch=host.shell.state.epoch,
        job=plan.job,
        script=plan.script,
        arguments=plan.arguments,
        slots=settings.nproc_per_node,
        standbys=settings.standby,
        max_restarts=settings.max_restarts,
    )
    registry.add(host.shell, assignment)
    server = await serve_remote(
        listening.host, listening.port, token=token, on_peer=registry.attend, silence_s=settings.silence_s
    )
    try:
        await host.open()
        console.say(
            f"keepstep: job {plan.job} waits for {plan.nnodes} agents at {listening.host}:{server.port}, "
            f"run directory {directory.path}",
            error=True,
        )
        ticking = background(host.shell.tick())
        await host.shell.done.wait()
        ticking.cancel()
        state = host.shell.state
        await registry.dismiss(plan.job, code=state.exit_code or 0, why=state.exit_why)
    finally:
        await server.close()
        await host.close()
    return host.finish()
