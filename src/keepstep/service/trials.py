"""Runs trials: one process that imports torch once, a child of it for each rank, bounds on time and memory, traces."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.errors import EnvironmentProblem, TornRecord
from keepstep.records.trial import Trace, TrialPlan, TrialRecord, decode_record, scratch_name, trace_of
from keepstep.service.clock import Clock

__all__ = ["Nursery", "TrialLimits", "Trials", "last_lines"]

_START_S = 120.0
_GRACE_S = 10.0
_LOOK_S = 0.1
_MOST_TRACE_BYTES = 128 * 1024 * 1024
_MOST_TEXT_BYTES = 65536
_MOST_OUTPUT_BYTES = 256 * 1024 * 1024
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ')
_OTHERS = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {
        str(Path(__file__).parents[1]),
        *(p for p in (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")) if p),
    }
)


class TrialLimits(msgspec.Struct, frozen=True):
    """Bounds: bytes of resident memory of one trial, seconds of all together."""

    memory_bytes: int
    whole_s: float


class _Running(msgspec.Struct):
    pid: int
    since: float
    cut: str = ""
    cut_text: str = ""


class Nursery:
    """The process that forks trials, for any number of plans. Use it as a context: nothing that it started is left."""

    def __init__(self, directory: Path, environment: Mapping[str, str], *, clock: Clock) -> None:
        """Start it; what goes wrong in it is written into `directory`."""
        self._clock = clock
        self._errors = directory / "nursery.out"
        self._rest = b""
        self._ready = False
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keepstep.training.trial_nursery"],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._news = self._process.stdin, self._process.stdout

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        """End everything: the process ends its trials when its input does."""
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(self._process.pid)
            self._process.wait()
        self._news.close()

    def wait_until_ready(self) -> None:
        """Until torch is imported. Raises EnvironmentProblem."""
        if self._ready:
            return
        end = self._clock.monotonic() + _START_S
        while b"ready" not in self.lines():
            if self._clock.monotonic() > end:
                raise EnvironmentProblem("trials cannot run: torch is not imported in time")
        self._ready = True

    def start(self, rank: int, plan_file: Path) -> None:
        """Begin the trial of `rank`."""
        self._orders.write(b"%d %s\n" % (rank, os.fsencode(plan_file)))
        self._orders.flush()

    def lines(self) -> list[bytes]:
        """What it said since the last call, waiting for a moment. Raises EnvironmentProblem when it is gone."""
        if not select.select([self._news], [], [], _LOOK_S)[0]:
            return []
        data = os.read(self._news.fileno(), 65536)
        if not data:
            text = last_lines(self._errors, 1)
            raise EnvironmentProblem(f"trials cannot run: {text}", remedy="see `keepstep doctor`")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class Trials:
    """The trials of one plan, in `nursery`."""

    def __init__(self, plan: TrialPlan, nursery: Nursery, *, limits: TrialLimits, clock: Clock) -> None:
        """Nothing runs yet."""
        self._plan, self._nursery, self._limits, self._clock = plan, nursery, limits, clock
        self._directory = Path(plan.directory)
        self._began = clock.monotonic()
        self._running: dict[int, _Running] = {}
        self._files = (self._directory / "plan.json", self._directory / "guess.json")
        for file, guess in zip(self._files, (False, True), strict=True):
            file.write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, guess=guess)))

    def stop(self) -> None:
        """End what is still under way."""
        for one in self._running.values():
            _kill(one.pid)

    @property
    def time_is_up(self) -> bool:
        """Whether no further trial may begin."""
        return self._clock.monotonic() - self._began >= self._limits.whole_s

    def run(
        self, ranks: Sequence[int], *, at_once: int, tell: Callable[[Trace, float], None], guess: bool = False
    ) -> list[Trace]:
        """The traces of `ranks`, `at_once` at a time; `tell` gets each with its seconds. Stops where time is up, or
        when two of them hung. `guess` as in `TrialPlan`."""
        waiting = list(ranks)
        done: list[Trace] = []
        while waiting or self._running:
            hung = sum(trace.cut == "hang" for trace in done)
            if self.time_is_up or hung > 1:
                waiting.clear()
            while waiting and len(self._running) < at_once:
                self._start(waiting.pop(0), guess=guess)
            for rank, code in self._ended():
                one = self._running.pop(rank)
                trace = self._trace(rank, one, code=code)
                done.append(trace)
                tell(trace, self._clock.monotonic() - one.since)
            self._watch()
        return done

    def _start(self, rank: int, *, guess: bool) -> None:
        """Begin a trial of `rank`, which finds nothing of what an earlier one of it wrote."""
        shutil.rmtree(self._directory / scratch_name(rank), ignore_errors=True)
        self._running[rank] = _Running(0, self._clock.monotonic())
        self._nursery.start(rank, self._files[guess])

    def _ended(self) -> list[tuple[int, int]]:
        """Ranks whose trial ended, with the exit code. Raises EnvironmentProblem if the nursery is gone."""
        ended = []
        for line in self._nursery.lines():
            what, rank, number = line.split()
            if what == b"started":
                self._running[int(rank)].pid = int(number)
            else:
                ended.append((int(rank), int(number)))
        return ended

    def _watch(self) -> None:
        """Keep to the bounds."""
        now = self._clock.monotonic()
        for rank, one in self._running.items():
            if not one.pid or one.cut:
                continue
            resident = _resident_bytes(one.pid)
            if resident > self._limits.memory_bytes:
                gib = 1 << 30
                bound = self._limits.memory_bytes / gib
                one.cut, one.cut_text = "memory", f"{resident / gib:.2f} GiB where {bound:.2f} GiB are allowed"
            elif now - one.since > self._plan.limit_s + _GRACE_S:
                one.cut = "hang"
            elif _size(self._directory / f"rank-{rank}.out") > _MOST_OUTPUT_BYTES:
                one.cut, one.cut_text = "output", "keepstep: it printed too much"
            if one.cut:
                _kill(one.pid)

    def _trace(self, rank: int, one: _Running, *, code: int) -> Trace:
        records = _records(self._directory / f"rank-{rank}.trace")
        trace = trace_of(rank, records)
        if trace.ended is not None and trace.ended.how != "full":
            return trace
        dump = _text(self._directory / f"rank-{rank}.stack")
        cut, text = one.cut, one.cut_text
        if cut == "hang" or (not cut and dump.startswith("Timeout")):
            cut, text = "hang", f"{self._plan.limit_s:g} s"
        elif not cut and trace.ended is None:
            cut, text = "died", f"signal {code - 128}" if code > 128 else f"the script itself, with exit code {code}"
        return msgspec.structs.replace(trace, cut=cut, cut_text=text, stack=_stack(dump))


def last_lines(path: Path, count: int) -> str:
    """The last lines of a file, at most 64 KiB of it; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(_size(path) - _MOST_TEXT_BYTES, 0))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(line[:500] for line in lines[-count:])


def _records(path: Path) -> list[TrialRecord]:
    """The records of a trace; what a kill left of the last line is left out."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_MOST_TRACE_BYTES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        if line:
            with contextlib.suppress(TornRecord):
                found.append(decode_record(line))
    return found


def _stack(dump: str) -> tuple[str, ...]:
    """The script's own places on the main thread, which faulthandler prints last; the innermost first."""
    blocks = dump.split("most recent call first")
    places = []
    for line in blocks[-1].splitlines():
        found = _FRAME.match(line)
        if found and not found["file"].startswith(("<", *_OTHERS)):
            file = os.path.relpath(found["file"])
            places.append(f"{found['file'] if file.startswith('..') else file}:{found['line']}")
    return tuple(places)


def _text(path: Path) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST_TEXT_BYTES)
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read(256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _kill(pid: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
