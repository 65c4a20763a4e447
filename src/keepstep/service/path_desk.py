"""Puts a job's traffic on planned paths: joins the conductor to members, agents, journal and console.

The conductor (`traffic.conducting`) decides; here facts become its input, and its actions orders and records.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.control.job_state import Directed
from keepstep.control.roster import Member, by_rank
from keepstep.errors import UsageError
from keepstep.records.demand import Demand, Seat
from keepstep.records.events import TrafficChange, TrafficRoutes
from keepstep.records.messages import Fact, PathsReady, PeerLostReport, TakePaths
from keepstep.records.path_messages import CountPaths, PathsCounted, PathsProbed, ProbePaths
from keepstep.records.plan import ChangeKind
from keepstep.records.summary import WatchReport
from keepstep.records.summary_rows import PEER_ROW, unpacked
from keepstep.records.watch_messages import Watched
from keepstep.service.clock import Clock
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.output import Console
from keepstep.service.path_survey import port_range
from keepstep.service.traffic_files import load_topology
from keepstep.service.traffic_site import plan_in_force
from keepstep.traffic.calls import CallsUnderWay
from keepstep.traffic.conducting import TrafficConductor
from keepstep.traffic.path_actions import (
    Action,
    AskCounts,
    AskHops,
    ConductorSettings,
    GivePaths,
    Place,
    Renew,
    Seen,
    Tell,
)
from keepstep.traffic.planner import Planner
from keepstep.traffic.stages import Stage, StagePolicy, admitted

__all__ = ["PathDesk", "TrafficFile", "read_traffic_file"]

_TURN_S = 0.2
_COLLECTIVES = 0
_MAX_FILE_BYTES = 1 << 20
_PIECE = 500
_PLANS = 100_000
"""Plans that one controller may number; the next one goes on behind, since members take no plan older than theirs."""
_FEWEST_PORTS = 16
_MOST_HOPS = 32


class TrafficFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The TOML file of the setting `traffic`. Nodes are named as the hosts of the topology are.

    `topology` is a file, `site` a directory of `keepstep traffic site`, whose other jobs keep their ways; one of the
    two, relative to this file. `hops` names the switches by the address that they answer a probe from, `ports` are the
    source ports that may be used, FIRST-LAST. `stage`, `priority` and the two limits say whether the plan is put in
    force or only told, as in `traffic.stages`.
    """

    hops: dict[str, str]
    topology: str = ""
    site: str = ""
    ports: str = "42000-42127"
    ttl: int = 2
    stage: Stage = "advise"
    priority: int = 0
    low_priority: int = 0
    large_ranks: int = 64
    least_bytes: float = 65536.0


def read_traffic_file(path: Path) -> tuple[TrafficFile, Planner]:
    """The file and a planner on its topology. Raises UsageError or RecordError with what is wrong."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError("the traffic file is too large", where=str(path))
        found = msgspec.toml.decode(path.read_bytes(), type=TrafficFile)
    except OSError as error:
        raise UsageError(f"cannot read the traffic file: {error.strerror}", where=str(path)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        known = ", ".join(TrafficFile.__struct_fields__)
        raise UsageError(f"bad traffic file: {error}", where=str(path), remedy=f"known keys: {known}") from error
    if len(port_range(found.ports)) < _FEWEST_PORTS or not 1 <= found.ttl <= _MOST_HOPS:
        raise UsageError(
            f"ports {found.ports} and ttl {found.ttl}",
            where=str(path),
            remedy=f"give at least {_FEWEST_PORTS} ports, so that every path has some, and 1 to {_MOST_HOPS} hops",
        )
    _check_values(found, path)
    if bool(found.topology) == bool(found.site):
        raise UsageError("a traffic file names a topology or a site", where=str(path), remedy="give one of the two")
    if found.site:
        planner = plan_in_force(path.parent / found.site)
    else:
        planner = Planner(load_topology(path.parent / found.topology))
    tier = planner.network.tier
    unknown = sorted(set(found.hops.values()) - set(tier))
    if unknown:
        raise UsageError(f"hops name no switch of the topology: {', '.join(unknown[:5])}", where=str(path))
    leaves = sorted(name for name in set(found.hops.values()) if tier[name] == 1)
    if leaves:
        raise UsageError(f"hops name leaves, not what joins them: {', '.join(leaves[:5])}", where=str(path))
    return found, planner


def _check_values(found: TrafficFile, path: Path) -> None:
    """Raises UsageError for limits below 0 and hops that are no addresses."""
    for name in ("least_bytes", "large_ranks"):
        value = getattr(found, name)
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} {value:g}", where=str(path), remedy="give a number of at least 0")
    for address in found.hops:
        try:
            ipaddress.IPv4Address(address)
        except ValueError as error:
            text = f"{address!a} in hops is no IPv4 address"
            raise UsageError(text, where=str(path), remedy="give the address that the switch answers from") from error


class PathDesk:
    """The paths of one job. Give `take` every fact; it never keeps one from others but its own."""

    def __init__(
        self, shell: JobShell, keeper: Keeper, *, file: tuple[TrafficFile, Planner], clock: Clock, console: Console
    ) -> None:
        found, planner = file
        spec = shell.state.spec
        seats = tuple(Seat(rank, "") for rank in range(spec.world))
        policy = StagePolicy(found.stage, found.low_priority, found.large_ranks)
        acts, why = admitted(Demand(spec.job, seats, (), priority=found.priority), policy)
        console.say(f"keepstep: traffic: plans are {'put in force' if acts else 'only told'} ({why})", error=True)
        settings = ConductorSettings(
            hops=found.hops,
            ports=port_range(found.ports),
            ttl=found.ttl,
            least_bytes=found.least_bytes,
            act=acts,
        )
        self._conductor = TrafficConductor(spec.job, planner, settings=settings)
        self._calls = CallsUnderWay()
        self._acts = acts
        self._stage = found.stage
        self._shell = shell
        self._keeper = keeper
        self._clock = clock
        self._console = console
        self._version = 0

    def take(self, fact: Fact, *, rank: int) -> bool:
        """Look at a fact of `rank` (-1: of an agent); True if it is about paths and nobody else's business."""
        match fact:
            case Watched():
                self._watched(fact.report)
                return False
            case PathsProbed():
                self._conductor.hops(fact.number, fact.hops, why=fact.why)
            case PathsCounted():
                self._conductor.counted(fact.number, fact.carried)
            case PathsReady():
                self._conductor.ready(rank, fact.number - self._before(), installed=fact.installed, why=fact.why)
            case _:
                return False
        return True

    async def run(self) -> None:
        """Let the conductor act until cancelled."""
        while True:
            await asyncio.sleep(_TURN_S)
            self.turn()

    def turn(self) -> None:
        """Let the conductor act, unless it is open who is a member: in a change, and in the commit of a move."""
        state = self._shell.state
        committing = state.move is not None and state.move.committing
        if state.phase != "running" or state.change is not None or committing or state.exit_code is not None:
            return
        self._conductor.members(state.generation, dict(self._places()))
        for action in self._conductor.step(self._clock.wall()):
            self._obey(action)

    def _before(self) -> int:
        """The plans of earlier controllers, at most."""
        return (self._shell.state.epoch - 1) * _PLANS

    def _places(self) -> Iterator[tuple[int, Place]]:
        for rank, member in by_rank(self._shell.state.members).items():
            if member.address is not None:
                yield rank, Place(member.node, member.address.host, member.address.port)

    # -------------------------------------------------------------- what members do

    def _watched(self, report: WatchReport) -> None:
        for window in report.windows:
            steps = window.last_step - window.first_step + 1
            seen = [Seen(window.rank, -1, steps)]
            for row in unpacked((window.peers,), PEER_ROW):
                if row["lane"] == _COLLECTIVES:
                    seen.append(Seen(window.rank, int(row["peer"]), steps, float(row["sent"])))
            self._conductor.seen(seen, generation=window.generation)
        now, generation = self._clock.wall(), self._shell.state.generation
        for progress in report.progress:
            if progress.generation != generation:
                continue
            for rank, peer in self._calls.stalled(progress, now=now):
                self._conductor.stalled(rank, peer, generation=generation, now=now)

    # -------------------------------------------------------------- what is done

    def _obey(self, action: Action) -> None:
        epoch = self._shell.state.epoch
        match action:
            case AskHops():
                order = ProbePaths(epoch, action.number, action.ways, action.ttls)
                self._shell.pass_on(Directed(action.node, "", order, "which way do connections go?"))
            case AskCounts():
                count = CountPaths(epoch, action.number, action.ways)
                self._shell.pass_on(Directed(action.node, "", count, "what did connections carry?"))
            case GivePaths():
                member = self._member(action.rank)
                if member is not None:
                    paths = TakePaths(epoch, self._before() + action.number, action.dial, action.accept)
                    self._shell.order(Directed(member.node, member.name, paths, f"path plan {action.number}"))
            case Renew():
                member = self._member(action.rank)
                if member is not None:
                    fact = PeerLostReport(self._shell.state.generation, action.peer)
                    self._shell.feed(fact, node=member.node, member=member.name)
            case Tell():
                self._tell(action)

    def _tell(self, action: Tell) -> None:
        self._console.say(f"keepstep: traffic: {action.text}", error=True)
        self._version += 1
        state = self._shell.state
        kind: ChangeKind = "arrive" if action.added else "fail" if action.down else "restore"
        change = TrafficChange(
            job=state.spec.job,
            generation=state.generation,
            wall=self._clock.wall(),
            change="refused" if action.failed else kind,
            version=self._version,
            stage=self._stage,
            applied=self._acts and not action.failed,
            reason=action.text,
            links=action.down,
            added=action.added,
            moved=action.moved,
            max_load=action.max_load,
            bound=action.bound,
        )
        pieces = [action.routes[start : start + _PIECE] for start in range(0, len(action.routes), _PIECE)]
        for piece in pieces:
            self._keeper.keep(TrafficRoutes(job=state.spec.job, wall=change.wall, version=self._version, routes=piece))
        self._keeper.keep(change, durable=True)

    def _member(self, rank: int) -> Member | None:
        return by_rank(self._shell.state.members).get(rank)
