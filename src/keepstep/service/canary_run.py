"""A canary: the same script on few ranks for few steps, in a directory of its own, before the whole job begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.errors import KeepstepError, UsageError
from keepstep.fleet.canary_verdict import canary_trouble
from keepstep.fleet.report import RunReport
from keepstep.records.canary import canary_name, canary_steps
from keepstep.service.job_host import JobPlan
from keepstep.service.output import Console
from keepstep.service.run_directory import CANARY_FOLDER, REPORT_FILE, RunDirectory
from keepstep.service.stop_signals import STOPPED_BY, stopped_words

__all__ = ["Canary", "CanaryFailed", "canary_plan", "last_word", "not_a_canary", "run_canary"]

_MAX_REPORT_BYTES = 64 * 1024 * 1024


class Canary(msgspec.Struct, frozen=True):
    """`ranks` of the canary (0: there is none) and the `steps` it makes."""

    ranks: int = 0
    steps: int = 10


class CanaryFailed(KeepstepError):
    """The canary did not come to a clean end; the job was not widened."""

    exit_code = 1


def not_a_canary(job: str) -> None:
    """Raise UsageError if a person gave a job the name of a canary."""
    if canary_steps(job):
        raise UsageError(f"{job} is the name of a canary", remedy="give the job another name and use --canary")


def canary_plan(plan: JobPlan, canary: Canary) -> JobPlan:
    """The job of the canary: no standbys, no restarts, no faults on purpose. Raises UsageError if it does not fit."""
    here = plan.settings.nproc_per_node
    if canary.steps < 1:
        raise UsageError(f"a canary of {canary.steps} steps", remedy="--canary-steps takes at least 1")
    if not 1 <= canary.ranks <= plan.world:
        raise UsageError(f"a canary of {canary.ranks} ranks for a job of {plan.world}", remedy=f"1 to {plan.world}")
    if canary.ranks > here and canary.ranks % here:
        raise UsageError(
            f"a canary of {canary.ranks} ranks on nodes of {here}", remedy=f"a multiple of {here}, or less"
        )
    settings = msgspec.structs.replace(
        plan.settings,
        nproc_per_node=min(canary.ranks, here),
        standby=0,
        max_restarts=0,
        traffic="",
        on_shortage="stop",  # no other agent is let in
    )
    return msgspec.structs.replace(
        plan,
        job=canary_name(plan.job, canary.steps),
        nnodes=max(canary.ranks // here, 1),
        settings=settings,
        drills=(),
    )


def run_canary(plan: JobPlan, canary: Canary, *, path: Path, lead: Callable[[JobPlan, Path], int]) -> RunDirectory:
    """Run the canary of `plan` in a folder of the run directory `path`, where its report stays.

    The run directory is held from before the canary on, and returned for the job itself. `lead(plan, path)` runs a job
    to its end. Raises CanaryFailed if the canary is no reason to go on, or somebody ended it by a signal, UsageError
    and EnvironmentProblem if it cannot begin.
    """
    small = canary_plan(plan, canary)
    directory = RunDirectory(path, reserve_bytes=plan.settings.reserve_bytes)
    with contextlib.ExitStack() as unless_good:
        unless_good.callback(directory.close)
        _judge(lead(small, path / CANARY_FOLDER), canary, folder=path / CANARY_FOLDER)
        unless_good.pop_all()
    console = Console()
    console.say(f"keepstep: the canary of {canary.ranks} ranks came to a clean end, the job begins", error=True)
    console.close()
    return directory


def _judge(code: int, canary: Canary, *, folder: Path) -> None:
    """Raise CanaryFailed if the canary in `folder`, which ended with `code`, is no reason to go on."""
    report = _report_of(folder)
    if report is not None and report.why in map(stopped_words, STOPPED_BY):
        stopped = CanaryFailed(f"the canary of {canary.ranks} ranks was {report.why}; the job was not started")
        stopped.exit_code = code
        raise stopped
    why = f"it ended with {code}" if report is None else canary_trouble(report, steps=canary.steps)
    if code and not why:
        why = f"it ended with {code}"
    if why:
        remedy = f"see `keepstep report {folder}` and its logs; the job was not started"
        raise CanaryFailed(f"the canary of {canary.ranks} ranks is no reason to go on: {why}", remedy=remedy)


def last_word(report: RunReport, job: str) -> tuple[int, str]:
    """The exit code that agents of `job`, a canary, end with and why; 0: they come again, for the job itself."""
    why = canary_trouble(report, steps=canary_steps(job))
    if not why:
        return 0, report.why
    return report.exit_code or CanaryFailed.exit_code, f"the canary is no reason to go on: {why}"


def _report_of(folder: Path) -> RunReport | None:
    try:
        with open(folder / REPORT_FILE, "rb") as file:
            return msgspec.json.decode(file.read(_MAX_REPORT_BYTES), type=RunReport)
    except (OSError, msgspec.MsgspecError):
        return None
