"""One rank's trial: the script runs from its top until it made the wanted steps; what it did is written down."""

from __future__ import annotations

import functools
import linecache
import os
import resource
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from keepstep.errors import UsageError
from keepstep.records.trial import (
    Barred,
    DataSeen,
    Guessed,
    RankRead,
    StepBegun,
    StepsAsked,
    TrialEnded,
    TrialPlan,
    scratch_name,
)
from keepstep.training import user_job
from keepstep.training.data import Batches
from keepstep.training.joining import Membership
from keepstep.training.process_group import BACKEND
from keepstep.training.scratch_files import ScratchFiles
from keepstep.training.step import Step
from keepstep.training.trial_answers import Answers
from keepstep.training.trial_notes import TrialNotes
from keepstep.training.trial_world import TrialWorld, rank_variables
from keepstep.training.user_job import Job

__all__ = ["TrialJob", "run_trial"]

_RANKS = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"})
_STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
_MOST_TEXT = 500


class _Trial:
    """The rank under trial, in the process that runs it."""

    def __init__(self, plan: TrialPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        directory = Path(plan.directory)
        self.pid = os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self.notes = TrialNotes(os.open(directory / f"rank-{rank}.trace", flags, 0o600))
        self.answers = Answers(directory, rank)
        self.answers.starve = self.starve
        self.world = TrialWorld(rank, plan.world, notes=self.notes, answers=self.answers)
        self.before = _peak_bytes()
        self.updates: Counter[int] = Counter()

    def end(self, how: str, *, error: str = "", text: str = "", site: int = -1) -> NoReturn:
        """Write down how it ended and end this process."""
        if os.getpid() == self.pid:
            self.answers.write()
            updates = max(self.updates.values(), default=0)
            self.notes.keep_always(
                TrialEnded(
                    how,
                    error,
                    text[:_MOST_TEXT],
                    self._line(site),
                    site,
                    updates,
                    self.before,
                    _peak_bytes(),
                    _shared(),
                )
            )
        os._exit(0)

    def starve(self, peer: int) -> None:
        """An object is needed that `peer` sends: its trial has to come first, unless it is to be guessed."""
        if not self.plan.guess:
            self.end("starved", text=str(peer))
        self.notes.keep(Guessed(peer))

    def _line(self, site: int) -> str:
        file, _, line = self.notes.place(site).rpartition(":")
        return linecache.getline(file, int(line)).strip()[:_MOST_TEXT] if file else ""

    def begin_step(self, number: int) -> None:
        """Calls belong to step `number` from now on."""
        self.notes.step = number
        self.notes.keep(StepBegun(number))

    def before_update(self, optimizer: torch.optim.Optimizer, *call: object) -> None:
        """A script that does not use `job.steps` ends before the update after the last wanted one."""
        if self.notes.full:
            self.end("full")
        if self.world.how != "join" and self.updates[id(optimizer)] >= self.plan.steps:
            self.end("steps")

    def after_update(self, optimizer: torch.optim.Optimizer, *call: object) -> None:
        """Count it."""
        self.updates[id(optimizer)] += 1
        if self.world.how != "join":
            self.begin_step(max(self.updates.values()))

    def join(self) -> Job:
        """What `keepstep.join` is in a trial."""
        if dist.is_initialized():
            raise UsageError("join() after init_process_group()", remedy="let join() set up torch.distributed")
        self.world.note_join("join", world=-1, rank=-1)
        dist.init_process_group(BACKEND)
        return TrialJob(self)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Write down a process that the script starts by itself."""
        if event in _STARTS and os.getpid() == self.pid:
            site = self.notes.direct()
            if site >= 0:
                self.notes.keep(Barred("process", str(arguments[0])[:100] if arguments else "fork", site))


class TrialJob(Job):
    """A member's view of the job while it is tried out."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__(Membership(rank=trial.rank, world=trial.plan.world, attempt=0, guard=None))
        self._trial = trial

    def steps(self, total: int) -> Iterator[Step]:
        """The first steps only."""
        trial = self._trial
        trial.notes.keep(StepsAsked(total, trial.notes.site()))
        if self._tracked is None:
            raise UsageError("job.steps() before job.track()", remedy="call job.track(model=..., optimizer=...) first")
        for step in super().steps(total):
            trial.begin_step(step.number)
            yield step
            if step.number + 1 >= trial.plan.steps:
                trial.end("steps")

    def data(self, source: Any, *, name: str = "") -> Batches:
        """As usual; how many batches there are is written down."""
        kind = "once" if hasattr(source, "__next__") else "stream"
        self._trial.notes.keep(DataSeen(kind, _length(source), self._trial.notes.site()))
        return super().data(source, name=name)


def run_trial(plan: TrialPlan, rank: int) -> NoReturn:
    """Run the script as `rank`; the process ends with it."""
    trial = _Trial(plan, rank)
    os.environ.update(rank_variables(rank, plan.world, local=plan.local))
    trial.world.enter()
    user_job.join = trial.join  # type: ignore[assignment]
    register_optimizer_step_pre_hook(trial.before_update)
    register_optimizer_step_post_hook(trial.after_update)
    _watch_loaders(trial)
    _watch_environment(trial)
    sys.addaudithook(trial.audit)
    _scratch(trial)
    sys.argv = [plan.script, *plan.arguments]
    sys.path[0] = str(Path(plan.script).resolve().parent)
    try:
        runpy.run_path(plan.script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            trial.end("exit", text=str(error.code), site=_place(trial, error))
    except BaseException as error:
        traceback.print_exc()
        trial.end("error", error=type(error).__name__, text=str(error), site=_place(trial, error))
        raise
    trial.end("script")


def _scratch(trial: _Trial) -> None:
    """From now on this process writes into its scratch directory; each path is noted once."""
    directory = Path(trial.plan.directory) / scratch_name(trial.rank)
    directory.mkdir(parents=True, exist_ok=True)
    told: set[tuple[str, str]] = set()

    def tell(what: str, path: str) -> None:
        if (what, path) not in told:
            told.add((what, path))
            trial.notes.keep(Barred(what, path, trial.notes.site()))

    own = os.path.realpath(trial.plan.directory) + os.sep
    ScratchFiles(directory, free=lambda path: path.startswith(own), told=tell).enter()


def _place(trial: _Trial, error: BaseException) -> int:
    """The innermost line of the script that the exception passed."""
    frames: list[tuple[FrameType, int]] = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for frame, line in reversed(frames):
        if (number := trial.notes.at(frame, line)) >= 0:
            return number
    return -1


def _watch_loaders(trial: _Trial) -> None:
    """Write down how many batches a loader has that the script iterates itself."""
    original = DataLoader.__iter__
    seen: set[int] = set()

    @functools.wraps(original)
    def iterate(loader: DataLoader[Any]) -> Any:
        if id(loader) not in seen:
            seen.add(id(loader))
            site = trial.notes.direct()
            if site >= 0:
                trial.notes.keep(DataSeen("loop", _length(loader), site))
        return original(loader)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]


def _length(source: Any) -> int:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return -1


def _watch_environment(trial: _Trial) -> None:
    """Write down where the script reads its rank before it joined."""
    known: Any = type(os.environ)
    seen: set[int] = set()

    class Environment(known):  # type: ignore[misc]
        """The environment, watched."""

        def __getitem__(self, key: str) -> str:
            if key in _RANKS and not trial.world.joined and os.getpid() == trial.pid:
                site = trial.notes.direct()
                if site >= 0 and site not in seen:
                    seen.add(site)
                    default = sys._getframe(1).f_code.co_name in ("get", "__contains__")
                    trial.notes.keep(RankRead(key, default, site))
            return known.__getitem__(self, key)

    os.environ.__class__ = Environment  # type: ignore[misc]


def _peak_bytes() -> int:
    """Peak of resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _shared() -> int:
    """Resident bytes that are pages of files: libraries, which the processes of a node share."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = next((line.split() for line in file if line.startswith("RssFile:")), ["", "0"])
    return int(found[1]) * 1024
