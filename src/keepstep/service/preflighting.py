"""`keepstep preflight`: try out the first steps of some ranks as in a world of any size, and say what would fail."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from keepstep.diagnosis.trial_ranks import first_ranks, kind_of, more_ranks, peers_of
from keepstep.diagnosis.trial_verdict import NodeMemory, memory_finding, node_memory, not_looked_at, trial_findings
from keepstep.errors import UsageError
from keepstep.records.trial import CallKept, Trace, TrialFinding, TrialPlan, place_of
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.environment import training_environment
from keepstep.service.launcher import checked_script, needs_library
from keepstep.service.trials import Nursery, TrialLimits, Trials, last_lines
from keepstep.store.machine_memory import free_bytes, machine_bytes

__all__ = ["MOST_WORLD", "PreflightReport", "PreflightRequest", "RankTried", "open_nursery", "preflight"]

MOST_WORLD = 65536
_MOST_TRIALS, _MOST_WITH_PEERS = 16, 32
_MOST_TIMES = 12
_RANKS_ON_NODE = 8
_SHARE = 0.8
_SHOWN_LINES, _SHOWN_RANKS = 3, 2


class PreflightRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for. `local` ranks on a node (0: not said), of `node_bytes` (0: as this machine); a trial may
    take `trial_s` seconds and `memory_bytes` (0: most of what is free), all together `whole_s`."""

    script: str
    arguments: tuple[str, ...] = ()
    world: int
    roles: tuple[int, ...] = ()
    steps: int = 2
    local: int = 0
    node_bytes: int = 0
    memory_bytes: int = 0
    trial_s: float = 120.0
    whole_s: float = 600.0


class RankTried(msgspec.Struct, frozen=True, kw_only=True):
    """One trial: the rank, its kind in words, steps and calls made, seconds and peak of memory measured here."""

    rank: int
    kind: str
    ended: str
    steps: int
    calls: int
    seconds: float
    peak_bytes: int


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `output` are the last lines of ranks that did not come to their end."""

    script: str
    arguments: tuple[str, ...]
    world: int
    findings: list[TrialFinding]
    ranks: list[RankTried]
    memory: NodeMemory | None
    notes: list[str]
    not_looked_at: list[str]
    output: dict[str, str]
    seconds: float

    @property
    def exit_code(self) -> int:
        """0: nothing was found."""
        return int(bool(self.findings))


def preflight(
    request: PreflightRequest, *, say: Callable[[str], None], nursery: Nursery | None = None
) -> PreflightReport:
    """Try the script out. `say` gets a line for each trial; `nursery` may be one that is there already.

    Raises UsageError and EnvironmentProblem.
    """
    _check(request)
    clock = SystemClock()
    directory = Path(tempfile.mkdtemp(prefix="keepstep-preflight-"))
    try:
        with contextlib.ExitStack() as stack:
            if nursery is None:
                nursery = stack.enter_context(open_nursery(directory))
            return _Preflight(request, directory, clock=clock, say=say).run(nursery)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def open_nursery(directory: Path) -> Nursery:
    """A process for trials, whose own troubles are written into `directory`."""
    return Nursery(directory, _environment(), clock=SystemClock())


def _check(request: PreflightRequest) -> None:
    if not 1 <= request.world <= MOST_WORLD:
        raise UsageError(f"a world of {request.world}", remedy=f"--as-world takes 1 to {MOST_WORLD}")
    for role in request.roles:
        if not 0 <= role < request.world:
            raise UsageError(f"no rank {role} in a world of {request.world}", remedy=f"0 to {request.world - 1}")
    if request.steps not in (1, 2):
        raise UsageError(
            f"{request.steps} steps", remedy="1 or 2; the script's own --steps stands before --as-world or after --"
        )
    needs_library(checked_script(request.script))
    try:
        ast.parse(Path(request.script).read_bytes(), request.script)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            f"the script cannot be parsed: {text}", where=request.script + line, remedy="correct the line"
        ) from error


class _Preflight:
    """One preflight under way."""

    def __init__(self, request: PreflightRequest, directory: Path, *, clock: Clock, say: Callable[[str], None]) -> None:
        self._request, self._directory, self._clock, self._say = request, directory, clock, say
        self._local = request.local or min(_RANKS_ON_NODE, request.world)
        self._traces: dict[int, Trace] = {}
        self._times: Counter[int] = Counter()
        self._seconds: dict[int, float] = {}
        self._left: list[int] = []

    def run(self, nursery: Nursery) -> PreflightReport:
        """All trials, then the verdict."""
        request = self._request
        began = self._clock.monotonic()
        plan = TrialPlan(
            script=request.script,
            arguments=request.arguments,
            world=request.world,
            steps=request.steps,
            local=self._local,
            limit_s=request.trial_s,
            directory=str(self._directory),
        )
        memory = request.memory_bytes or int(free_bytes() * _SHARE)
        nursery.wait_until_ready()
        trials = Trials(plan, nursery, limits=TrialLimits(memory, request.whole_s), clock=self._clock)
        try:
            self._try_out(trials)
        finally:
            trials.stop()
        self._traces = dict(sorted(self._traces.items()))
        return self._report(self._clock.monotonic() - began)

    def _try_out(self, trials: Trials) -> None:
        """Rank 0 first: what it sends, others are answered with. Its groups tell which ranks differ in kind."""
        world = self._request.world
        first = first_ranks(world, self._request.roles, local=self._local)
        self._run(trials, first[:1])
        self._run(trials, first[1:])
        if not all(trace.whole for trace in self._traces.values()):
            return
        self._run(trials, more_ranks(self._traces[0], world))
        self._run(trials, peers_of(self._traces.values(), world))

    def _run(self, trials: Trials, ranks: Sequence[int]) -> None:
        """Trials of `ranks` that had none, and of those whose objects they need."""
        wanted = [rank for rank in ranks if rank not in self._traces and rank not in self._left]
        room = max(_MOST_TRIALS - len(self._traces), 0)
        self._left += wanted[room:]
        now = wanted[:room]
        while now:
            self._try(trials, now)
            now = self._next()
            if trials.time_is_up:
                self._left += [rank for rank in now if rank not in self._traces and rank not in self._left]
                break
        starved = [rank for rank, trace in self._traces.items() if trace.starved_of >= 0]
        self._try(trials, starved, guess=True)

    def _next(self) -> list[int]:
        """Whose trial comes next because somebody needs its objects, or because those it needs are there now."""
        starved = {rank: trace.starved_of for rank, trace in self._traces.items() if trace.starved_of >= 0}
        missing = [peer for peer in dict.fromkeys(starved.values()) if peer not in self._traces]
        if missing and len(self._traces) < _MOST_WITH_PEERS:
            return missing[:2]
        order = list(self._traces)
        return [
            rank
            for rank, peer in starved.items()
            if peer in self._traces and order.index(peer) > order.index(rank) and self._times[rank] < _MOST_TIMES
        ]

    def _try(self, trials: Trials, ranks: Sequence[int], *, guess: bool = False) -> None:
        """Trials of `ranks`; the newest trace of a rank stands last."""
        if not ranks:
            return
        for trace in trials.run(ranks, at_once=self._at_once(), tell=self._tell, guess=guess):
            self._traces.pop(trace.rank, None)
            self._traces[trace.rank] = trace
            self._times[trace.rank] += 1
        self._left += [rank for rank in ranks if rank not in self._traces]

    def _at_once(self) -> int:
        """Two trials beside each other where processors and memory are free, once a first one told what it takes."""
        if not self._traces or (os.cpu_count() or 1) < 2:
            return 1
        peak = max((trace.ended.peak_bytes for trace in self._traces.values() if trace.ended is not None), default=0)
        return 2 if peak and 2 * peak < free_bytes() * _SHARE else 1

    def _tell(self, trace: Trace, seconds: float) -> None:
        self._seconds[trace.rank] = seconds
        one = self._tried(trace)
        mib = f", {one.peak_bytes >> 20} MiB" if one.peak_bytes else ""
        if trace.starved_of >= 0:
            self._say(f"rank {trace.rank}: needs an object of rank {trace.starved_of} first")
            return
        self._say(f"rank {trace.rank}: {one.ended} after {seconds:.1f} s, {one.steps} steps, {one.calls} calls{mib}")

    def _tried(self, trace: Trace) -> RankTried:
        end = trace.ended
        return RankTried(
            rank=trace.rank,
            kind=kind_of(trace, self._request.world),
            ended=trace.cut or (end.how if end is not None else "died"),
            steps=max(trace.steps, end.updates if end is not None else 0),
            calls=sum(isinstance(event, CallKept) for event in trace.events),
            seconds=round(self._seconds.get(trace.rank, 0.0), 2),
            peak_bytes=end.peak_bytes if end is not None else 0,
        )

    def _report(self, seconds: float) -> PreflightReport:
        request = self._request
        traces = list(self._traces.values())
        memory = node_memory(traces, self._local, node_bytes=request.node_bytes or machine_bytes())
        found = trial_findings(traces, request.world)
        if memory is not None and request.local:
            found += memory_finding(memory)
        failed = [trace for trace in self._traces.values() if not trace.whole]
        lines = {
            str(t.rank): last_lines(self._directory / f"rank-{t.rank}.out", _SHOWN_LINES) for t in failed[:_SHOWN_RANKS]
        }
        return PreflightReport(
            script=request.script,
            arguments=request.arguments,
            world=request.world,
            findings=found,
            ranks=[self._tried(trace) for trace in traces],
            memory=memory,
            notes=_notes(traces),
            not_looked_at=not_looked_at(traces, left=self._left),
            output={rank: text for rank, text in lines.items() if text},
            seconds=round(seconds, 2),
        )


def _notes(traces: Sequence[Trace]) -> list[str]:
    """What is worth knowing and no fault, each once."""
    said: dict[str, None] = {}
    words = {"write": "writes", "remove": "removes", "process": "starts the process"}
    where = {"write": "into a scratch directory, gone now", "remove": "not done", "process": "ended with the trial"}
    for trace in traces:
        for one in trace.barred:
            said[f"the script {words[one.what]} {one.name} at {place_of(trace, one.site)}: {where[one.what]}"] = None
        for read in trace.reads:
            if not read.default and trace.joined and trace.joined[0].how == "join":
                said[f"{read.name} is read before join() at {place_of(trace, read.site)}: a standby runs the script "
                     "from its top again when it is given a rank"] = None  # fmt: skip
        for data in trace.data:
            total = max((asked.total for asked in trace.asked), default=0)
            if data.kind == "stream" and 0 < data.batches < total:
                said[f"{data.batches} batches an epoch at {place_of(trace, data.site)}, {total} steps: "
                     f"{-(-total // data.batches)} epochs"] = None  # fmt: skip
    return list(said)


def _environment() -> dict[str, str]:
    ordered = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    base = {key: value for key, value in os.environ.items() if not key.startswith("KEEPSTEP_")}
    return training_environment(base, ordered, run_id="preflight", own={}, master_port=None)
