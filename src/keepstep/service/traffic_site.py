"""The plan of a site over all its jobs, kept in a directory: topology, demands, and a journal of every change.

A change is in force when its `TrafficChange` line is in the journal; routes without it (a crash in between) do not
count. Anything that fails is written down as refused, and the plan before it stays in force.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import xxhash

from keepstep.errors import RecordError, StoreError, TrafficError, UsageError
from keepstep.records.demand import Demand, Flow
from keepstep.records.plan import Advice, Route, TrafficChange, TrafficOutcome, TrafficRoutes
from keepstep.records.topology import Topology
from keepstep.service.clock import Clock
from keepstep.store.disk import disk_error, sync_directory
from keepstep.store.journal import Journal, read_journal
from keepstep.traffic.advice import worth_planning
from keepstep.traffic.checking import checked
from keepstep.traffic.flows import flows_of
from keepstep.traffic.model import compare
from keepstep.traffic.planner import Change, Planner
from keepstep.traffic.stages import StagePolicy, admitted

__all__ = ["SiteFile", "SiteHistory", "TrafficSite", "history", "plan_in_force", "total_crossing"]

_PIECE = 5000
"""Routes in one line of the journal."""
_MODELLED_FLOWS = 20_000
"""The gain of a job is predicted up to this many flows in the site."""
_SEEDS = range(5)
_Value = TypeVar("_Value")


class SiteFile(msgspec.Struct, frozen=True):
    """A job as it is kept beside the journal: what it asks for, which flows are planned, why not the others, and how
    many regular flows leave each leaf, planned or not."""

    demand: Demand
    flows: tuple[Flow, ...]
    advice: tuple[Advice, ...]
    crossing: dict[str, int]


class SiteHistory(msgspec.Struct, frozen=True):
    """The changes and outcomes of a site, in order, the refused ones too."""

    changes: tuple[TrafficChange, ...]
    outcomes: tuple[TrafficOutcome, ...]


class TrafficSite:
    """One site, opened for changes; `planner` is its plan in force. Close it after use."""

    def __init__(self, directory: Path, journal: Journal, *, planner: Planner, clock: Clock) -> None:
        self.planner = planner
        self.files: dict[str, SiteFile] = {}
        self._directory = directory
        self._journal = journal
        self._clock = clock

    @classmethod
    def create(
        cls, directory: Path, topology: Topology, *, measure: Literal["flows", "bytes"], clock: Clock
    ) -> TrafficSite:
        """A new site. Raises TrafficError for a topology that cannot be planned on, UsageError if there is one."""
        planner = Planner(checked(topology), measure=measure)
        journal = Journal.open(directory)
        if any(True for _ in journal.replay()):  # nobody else can begin one meanwhile
            journal.close()
            raise UsageError("there is a site already", where=str(directory), remedy="use another directory")
        site = cls(directory, journal, planner=planner, clock=clock)
        digest = site._keep(topology)
        site._append(TrafficChange(change="topology", topology=digest, measure=measure))
        return site

    @classmethod
    def open(cls, directory: Path, clock: Clock) -> TrafficSite:
        """The site in `directory`, its plan rebuilt from the journal. Raises StoreError, RecordError, UsageError."""
        if not (directory / "journal.jsonl").exists():
            raise UsageError("no site there", where=str(directory), remedy="begin one with --start TOPOLOGY")
        journal = Journal.open(directory, create=False)
        try:
            planner, files = _replay(directory, tuple(journal.replay()))
        except BaseException:
            journal.close()
            raise
        site = cls(directory, journal, planner=planner, clock=clock)
        site.files = files
        return site

    def close(self) -> None:
        """Let others open it. May be called twice."""
        self._journal.close()

    def arrive(self, demand: Demand, *, stage: StagePolicy, everything: bool = False) -> TrafficChange:
        """Plan a job that comes; at a stage that does not admit it, only say what would be done.

        `everything` also plans what advice would leave to hashing. Raises TrafficError; the plan is then as it was.
        """

        def work() -> TrafficChange:
            others = total_crossing(kept.crossing for kept in self.files.values())
            worth = worth_planning(demand, self.planner.network, others=others)
            flows, advice = worth.flows, worth.advice
            if everything:
                flows = tuple(flows_of(demand, self.planner.network))
                advice = tuple(Advice(demand.job, use.name, True, "asked for") for use in demand.uses)
            applied, reason = admitted(demand, stage)
            change = self.planner.arrive(demand.job, flows, advice=advice)
            file = SiteFile(demand, flows, advice, worth.crossing)
            gain = self._predicted(demand.job)
            record = self._record("arrive", change, job=demand.job, reason=reason, applied=applied)
            record = msgspec.structs.replace(record, stage=stage.stage, demand=self._keep(file), predicted=gain)
            self._commit(record, change.routes if applied else ())
            if applied:
                self.files[demand.job] = file
                self._look_again(demand.job)
            else:
                self.planner, self.files = _replay(self._directory, tuple(self._journal.replay()))
            return record

        return self._tried(work, demand.job)

    def _look_again(self, newcomer: str) -> None:
        """Plan what was left to hashing because it was alone, where it no longer is. Nothing planned is given up."""
        for job, file in list(self.files.items()):
            alone = {one.use for one in file.advice if not one.plan and "expected_slowdown" in one.inputs}
            if job == newcomer or not alone:
                continue
            others = total_crossing(other.crossing for name, other in self.files.items() if name != job)
            try:
                worth = worth_planning(file.demand, self.planner.network, others=others)
            except TrafficError:  # it is cut off: nothing to plan, and no fault of the newcomer
                continue
            now = {one.use: one for one in worth.advice if one.use in alone and one.plan}
            if now:
                fresh = tuple(flow for flow in worth.flows if flow.use in now)
                advice = tuple(now.get(one.use, one) for one in file.advice)
                try:
                    change = self.planner.extend(job, fresh, advice=advice)
                except TrafficError:
                    continue
                self.files[job] = SiteFile(file.demand, (*file.flows, *fresh), advice, file.crossing)
                # without a stage: the job did not come now
                record = self._record("arrive", change, job=job, reason=f"with {newcomer} it is worth a plan")
                record = msgspec.structs.replace(record, demand=self._keep(self.files[job]))
                self._commit(record, change.routes)

    def leave(self, job: str) -> TrafficChange:
        """Take a job out. Raises TrafficError if it is not there."""

        def work() -> TrafficChange:
            change = self.planner.leave(job)
            self.files.pop(job, None)
            return self._commit(self._record("leave", change, job=job, reason="the job left"), change.routes)

        return self._tried(work, job)

    def set_links(self, *, down: Sequence[str] = (), up: Sequence[str] = ()) -> TrafficChange | None:
        """Links or switches went down, or came back; None if all were so before, and nothing changes.

        Raises TrafficError for unknown names, and one that is in both.
        """
        before = self.planner.network.down
        lost = tuple(name for name in dict.fromkeys(down) if name not in before)
        back = tuple(name for name in dict.fromkeys(up) if name in before)

        def work() -> TrafficChange | None:
            for name in (*down, *up):
                self.planner.network.links_of(name)
                if name in down and name in up:
                    raise TrafficError(f"{name!r} cannot be down and up")
            if not lost and not back:
                return None
            change = self.planner.set_down((before | set(lost)) - set(back))
            named = ((lost, "down"), (back, "back"))
            words = "; ".join(f"{', '.join(names)} {what}" for names, what in named if names)
            if change.stranded:
                words += f"; {len(change.stranded)} flows have no way left"
            record = self._record("fail" if lost else "restore", change, job="", reason=words)
            record = msgspec.structs.replace(record, links=tuple(sorted(self.planner.network.down)))
            return self._commit(record, change.routes)

        return self._tried(work, "")

    def outcome(self, measured: float, note: str = "") -> TrafficOutcome:
        """Write down what the newest arrival, planned or only advised, brought. Raises TrafficError if none came."""
        changes = history(self._directory).changes
        arrivals = [change for change in changes if change.change == "arrive" and change.stage]
        if not arrivals:
            raise TrafficError("no job has come yet; there is no outcome")
        last = arrivals[-1]
        record = TrafficOutcome(
            job=last.job,
            version=last.version,
            stage=last.stage,
            predicted=last.predicted,
            measured=measured,
            note=note,
            wall=self._clock.wall(),
        )
        self._journal.append(record, durable=True)
        return record

    def _tried(self, work: Callable[[], _Value], job: str) -> _Value:
        """Do `work`; what fails is written down as refused before it is raised on."""
        try:
            return work()
        except TrafficError as error:
            refusal = TrafficChange(
                change="refused", job=job, applied=False, reason=str(error), version=self.planner.version
            )
            self._append(refusal)
            raise

    def _record(
        self,
        kind: Literal["arrive", "leave", "fail", "restore"],
        change: Change,
        *,
        job: str,
        reason: str,
        applied: bool = True,
    ) -> TrafficChange:
        return TrafficChange(
            change=kind,
            job=job,
            version=self.planner.version,
            applied=applied,
            reason=reason,
            added=change.added,
            removed=change.removed,
            moved=change.moved,
            max_load=change.max_load,
            bound=change.bound,
        )

    def _commit(self, record: TrafficChange, routes: Sequence[Route]) -> TrafficChange:
        for start in range(0, len(routes), _PIECE):
            piece = tuple(routes[start : start + _PIECE])
            self._journal.append(TrafficRoutes(version=record.version, routes=piece))
        self._append(record)
        return record

    def _append(self, record: TrafficChange) -> None:
        self._journal.append(msgspec.structs.replace(record, wall=self._clock.wall()), durable=True)

    def _keep(self, value: Topology | SiteFile) -> str:
        """Write a value beside the journal under its hash; on the disk when this returns, as the change will be."""
        data = msgspec.msgpack.encode(value)
        digest = xxhash.xxh3_128_hexdigest(data)
        path = self._directory / f"{digest}.msgpack"
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            sync_directory(self._directory)
        except OSError as error:
            raise disk_error("cannot be kept", path, error=error) from error
        return digest

    def _predicted(self, job: str) -> float | None:
        """Hashed over planned time of the job's transfers, by the model; None where nothing of it is planned."""
        flows = [flow for name in self.planner.jobs for flow in self.planner.flows(name)]
        routes = self.planner.routes()
        known = {route.flow for route in routes}
        flows = [flow for flow in flows if flow.name in known]
        if len(flows) > _MODELLED_FLOWS or not any(flow.job == job for flow in flows):
            return None
        found = compare(flows, routes, network=self.planner.network, seeds=_SEEDS)
        return next(one.gain for one in found if one.job == job)


def history(directory: Path) -> SiteHistory:
    """Everything that happened at the site. Raises StoreError if there is none."""
    events, _ = read_journal(directory)
    return SiteHistory(
        tuple(event for event in events if isinstance(event, TrafficChange)),
        tuple(event for event in events if isinstance(event, TrafficOutcome)),
    )


def total_crossing(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several jobs' flows that leave each leaf."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def plan_in_force(directory: Path) -> Planner:
    """The plan of the site in `directory`, to look at or to plan on in a copy. Raises as `TrafficSite.open`."""
    if not (directory / "journal.jsonl").exists():
        raise UsageError("no site there", where=str(directory), remedy="begin one with --start TOPOLOGY")
    return _replay(directory, read_journal(directory)[0])[0]


def _replay(directory: Path, events: Sequence[object]) -> tuple[Planner, dict[str, SiteFile]]:
    """The plan in force and its jobs by a journal. Raises RecordError where journal and files do not fit."""
    planner: Planner | None = None
    jobs: dict[str, str] = {}
    ways: dict[str, tuple[tuple[str, ...], int]] = {}
    waiting: dict[int, list[Route]] = {}
    down: tuple[str, ...] = ()
    version = 0
    for event in events:
        if isinstance(event, TrafficRoutes):
            waiting.setdefault(event.version, []).extend(event.routes)
            version = max(version, event.version)  # never used again if its change did not follow
        elif isinstance(event, TrafficChange) and event.applied:
            if event.change == "topology":
                measure: Literal["flows", "bytes"] = "bytes" if event.measure == "bytes" else "flows"
                planner = Planner(_kept(directory, event.topology, kind=Topology), measure=measure)
            elif event.change == "arrive":
                jobs[event.job] = event.demand
            elif event.change == "leave":
                jobs.pop(event.job, None)
            else:
                down = event.links
            ways.update((route.flow, (route.path, route.cable)) for route in waiting.pop(event.version, ()))
            version = max(version, event.version)
    if planner is None:
        raise RecordError("the journal names no topology", where=str(directory))
    planner.network.set_down(down)
    files = {job: _kept(directory, digest, kind=SiteFile) for job, digest in jobs.items()}
    for job, file in files.items():
        planner.restore(job, file.flows, routes=ways)
        planner.advice[job] = file.advice
    planner.version = version
    return planner, files


def _kept(directory: Path, digest: str, *, kind: type[_Value]) -> _Value:
    path = directory / f"{digest}.msgpack"
    try:
        data = path.read_bytes()
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise RecordError("a file beside the journal is damaged", where=str(path))
        return msgspec.msgpack.decode(data, type=kind)
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except msgspec.MsgspecError as error:
        raise RecordError(f"a file beside the journal is damaged: {error}", where=str(path)) from error
