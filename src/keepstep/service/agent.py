"""The agent of one node: starts, watches and ends processes, and passes facts up and orders down. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from keepstep.errors import EnvironmentProblem, RecordError
from keepstep.records.canary import CanaryLoss, canary_steps
from keepstep.records.messages import (
    BatchSeen,
    Drill,
    Drilled,
    Fact,
    Hello,
    KillMember,
    MemberExited,
    MemberFact,
    MemberStarted,
    MemberStopped,
    Order,
    StartFailed,
    StartMember,
)
from keepstep.records.path_messages import CountPaths, ProbePaths
from keepstep.records.sandbox_messages import KeepRecording, WarmUp
from keepstep.records.watch_messages import CheckHang, GiveEvidence, MemberMoves, MismatchSaid, ProbeNode, TellCalls
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.drill_watch import DrillWatch, drilled_command, drilled_fact
from keepstep.service.environment import training_environment
from keepstep.service.flight_dumps import DUMPS_FOLDER, dump_environment
from keepstep.service.member_process import MemberProcess, bad_loss, mismatch_in
from keepstep.service.member_watch import MemberWatch
from keepstep.service.output import Console
from keepstep.service.path_prober import PathProber
from keepstep.service.ports import free_port
from keepstep.service.processes import frozen, start_process
from keepstep.service.ring_archive import RingArchive
from keepstep.service.ring_memory import RingMemory
from keepstep.service.settings import Settings
from keepstep.service.warden import Warden
from keepstep.store.wire_server import AgentWire, WireServer, serve

__all__ = ["RECORDINGS_FOLDER", "Agent", "AgentPlan"]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
RECORDINGS_FOLDER = "sandbox"
"""Where members on a node keep the recordings of their first steps, in its run directory."""
_MOST_BATCH_CHARACTERS = 200


class AgentPlan(msgspec.Struct, frozen=True):
    """What one agent is to run: `script` with `arguments` for `job` on `node`, its files under `directory`.

    `host` is the address that members on other nodes reach this node by.
    """

    job: str
    node: str
    script: str
    arguments: tuple[str, ...]
    directory: Path
    host: str = "127.0.0.1"


class Agent:
    """Runs in the main thread's event loop. Call `open()`, feed `obey()`, and always `close()`."""

    def __init__(
        self,
        plan: AgentPlan,
        upward: Callable[[str, Fact], None],
        *,
        settings: Settings,
        clock: Clock,
        console: Console,
    ) -> None:
        """`upward(member, fact)` takes facts to the controller; member is empty when the agent itself speaks."""
        self.members: dict[str, MemberProcess] = {}
        self._plan = plan
        self._canary = canary_steps(plan.job) > 0
        self._upward = upward
        self._settings = settings
        self._clock = clock
        self._console = console
        self._server: WireServer | None = None
        self._warden: Warden | None = None
        self._poller: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._ports: dict[int, int] = {}
        self._last_steps: dict[int, int] = {}
        self._archive = RingArchive(plan.directory, clock=clock)
        self._watch = MemberWatch(
            plan.node,
            lambda: tuple(self.members.values()),
            upward=upward,
            last_words=self._last_words,
            directory=plan.directory,
            clock=clock,
        )
        self._prober = PathProber(lambda fact: upward("", fact), clock=clock)
        self._drills = DrillWatch(self.members.values, clock=clock, report=lambda fact: upward("", fact))

    async def open(self) -> None:
        """Listen for members and start watching. Raises EnvironmentProblem where the socket cannot be had."""
        self._server = await serve(f"keepstep-{self._plan.job}-{secrets.token_hex(8)}", self._on_connect)
        self._warden = Warden()
        (self._plan.directory / DUMPS_FOLDER).mkdir(parents=True, exist_ok=True)
        self._poller = background(self._watch_frozen())
        self._watch.open()

    def obey(self, member: str, order: Order) -> None:
        """Carry out an order for `member`, or for the agent itself where `member` is empty."""
        match order:
            case StartMember():
                self._start(order)
            case KillMember():
                self._end(order.member, order.grace_s)
            case Drill():
                self._drills.arm(order)
            case ProbePaths() | CountPaths():
                self._prober.obey(order)
            case CheckHang() | GiveEvidence() | TellCalls() | ProbeNode():
                self._watch.obey(order)
            case _:
                self._forward(member, order)

    async def close(self, grace_s: float = 0.0) -> None:
        """End every process still there (SIGTERM, SIGKILL after `grace_s`) and close everything."""
        self._drills.close()
        self._prober.close()
        await self._watch.close()
        for name in tuple(self.members):
            self._end(name, grace_s)
        while self._ends:
            await asyncio.wait(self._ends)
        if self._poller is not None:
            self._poller.cancel()
        if self._server is not None:
            await self._server.close()
        if self._warden is not None:
            self._warden.close()
        self._archive.close()

    def steps(self) -> dict[int, int]:
        """The step every rank of this node is in; for one that is gone, the step it was in last."""
        found = dict(self._last_steps)
        for member in self.members.values():
            self._note_step(member, found)
        return found

    @staticmethod
    def _note_step(member: MemberProcess, found: dict[int, int]) -> None:
        """Note the step of `member`, unless it says none yet and its predecessor's is known."""
        step = member.ring.step()
        if member.rank >= 0 and (step or member.rank not in found):
            found[member.rank] = step

    def _start(self, order: StartMember) -> None:
        try:
            ring = RingMemory(order.member, slots=self._settings.ring_slots)
            command = drilled_command(self._command(order.rank), order.drill)
            process = start_process(command, self._environment(order))
        except (OSError, EnvironmentProblem) as error:
            self._upward("", StartFailed(order.member, order.rank, str(error)))
            return
        member = MemberProcess(order.member, order.rank, process=process, ring=ring)
        member.drill = order.drill
        self.members[order.member] = member
        self._last_steps.pop(order.rank, None)
        if self._warden is not None:
            self._warden.add(process.pid)
        look = partial(self._look_at_line, member)
        member.capture(self._plan.directory / "logs", self._console, on_line=look)
        process.watch(lambda: self._on_exit(member))
        self._upward("", MemberStarted(order.member, order.rank, self._plan.node, process.pid))
        if order.drill:
            self._upward("", Drilled(order.drill, order.rank, -1, self._clock.wall()))

    def _command(self, rank: int) -> list[str]:
        prefix = [sys.executable] if rank >= 0 else [sys.executable, "-m", "keepstep.training.standby"]
        return [*prefix, self._plan.script, *self._plan.arguments]

    def _environment(self, order: StartMember) -> dict[str, str]:
        alone = order.environment.get("GROUP_WORLD_SIZE") == "1"
        if alone and order.attempt not in self._ports:
            self._ports[order.attempt] = free_port()
        assert self._server is not None
        return training_environment(
            os.environ,
            order.environment,
            run_id=self._plan.job,
            own={
                "KEEPSTEP_AGENT": self._server.name,
                "KEEPSTEP_NODE": self._plan.node,
                "KEEPSTEP_HOST": self._plan.host,
            },
            master_port=self._ports[order.attempt] if alone else None,
            unless_set=dump_environment(self._plan.directory),
        )

    def _end(self, name: str, grace_s: float) -> None:
        member = self.members.get(name)
        if member is None:
            return
        if member.ended_by_order and frozen(member.process.pid):
            grace_s = 0.0  # it was given its chance to wake up
        member.ended_by_order = True
        task = background(member.process.end(grace_s))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    def _forward(self, name: str, order: Order) -> None:
        member = self.members.get(name)
        if member is None:
            return
        if isinstance(order, (KeepRecording, WarmUp)):
            order = msgspec.structs.replace(order, directory=str(self._plan.directory.resolve() / RECORDINGS_FOLDER))
        member.tell(order)

    def _look_at_line(self, member: MemberProcess, line: bytes) -> None:
        """Tell a mismatch that a library prints, in a canary also a loss that is no finite number: each once."""
        if not member.mismatch and (said := mismatch_in(line)):
            member.mismatch = said
            self._upward(member.name, MismatchSaid(member.name, member.rank, said))
        if self._canary and not member.bad_loss and (loss := bad_loss(line)):
            member.bad_loss = loss
            self._upward(member.name, CanaryLoss(member.name, member.rank, loss, f"{member.name}.log"))

    def _on_exit(self, member: MemberProcess) -> None:
        del self.members[member.name]
        self._note_step(member, self._last_steps)
        rings = {m.name: m.ring for m in (*self.members.values(), member)}
        private, onset = self._archive.last_words(member.name, rings)
        process = member.process
        if self._canary or not member.protected or process.signal == signal.SIGABRT:
            # what it printed last is told before its end; behind the words of a library comes SIGABRT
            member.drain()
        if self._warden is not None:
            self._warden.remove(process.pid)
        fact = MemberExited(
            member.name, member.rank, process.code, process.signal, private, onset, protected=member.protected
        )
        if process.code and member.protected:
            self._watch.tell_calls(member)
        self._upward(member.name, fact)
        if process.code and not member.ended_by_order and member.protected:
            self._archive.save(rings)
        elif member.protected and member.rank >= 0:
            self._archive.save_last(member.rank, member.ring)
        member.drain()
        member.ring.close()

    async def _on_connect(self, peer: AgentWire) -> None:
        member = next((m for m in self.members.values() if m.process.pid == peer.pid), None)
        if member is None:
            _log.warning("refused a connection from process %d, which is no member", peer.pid)
            return
        peer.post_descriptor(member.ring.descriptor)
        member.wire = peer
        while True:
            try:
                message = await peer.receive()
            except RecordError as error:
                _log.error("member %s spoke nonsense: %s", member.name, error)
                return
            if not isinstance(message, MemberFact):
                _log.error("member %s may not say %s", member.name, type(message).__name__)
                return
            if isinstance(message, BatchSeen):
                member.batch = message.batch[:_MOST_BATCH_CHARACTERS]
                continue
            member.protected = member.protected or isinstance(message, Hello)
            member.note_said(message)
            self._upward(member.name, drilled_fact(message, member.drill))

    async def _watch_frozen(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            now = self._clock.wall()
            for member in tuple(self.members.values()):
                if member.moves_again():
                    self._upward(member.name, MemberMoves(member.name, member.rank))
                since = member.newly_frozen(now, after_s=self._settings.frozen_s)
                if since is not None and not member.ended_by_order:
                    self._report_frozen(member, since)

    def _report_frozen(self, member: MemberProcess, since: float) -> None:
        private, onset = self._last_words(member.name)
        self._upward(member.name, MemberStopped(member.name, member.rank, since, private, onset))
        self._archive.save({m.name: m.ring for m in self.members.values()})

    def _last_words(self, name: str) -> tuple[dict[int, bytes], float]:
        """What `name` published last, and when the first collective left its pattern."""
        return self._archive.last_words(name, {m.name: m.ring for m in self.members.values()})
