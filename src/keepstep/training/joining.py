"""How a process becomes a member: from an agent's welcome, from torchrun's environment, or alone."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from keepstep import __version__
from keepstep.control.member import MemberState
from keepstep.errors import EnvironmentProblem, PeerLost, UsageError
from keepstep.records.messages import Fence, Hello, Stop, Welcome
from keepstep.records.sandbox_messages import RecordStep, WarmUp
from keepstep.records.watch_messages import STACK_SIGNAL
from keepstep.store.wire import Wire
from keepstep.training import process_group
from keepstep.training.agent_link import AgentLink
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Mode, Place, connect_fabric
from keepstep.training.guard import Guard
from keepstep.training.hearing import HEARING
from keepstep.training.recorder import Recorder
from keepstep.training.rehearsals import Rehearsals
from keepstep.training.replay import Replay, objects_are_none
from keepstep.training.sandbox import Sandbox, rehearsed_variables

__all__ = ["Membership", "Warm", "await_role", "become_member", "warm_up_membership"]

_log = logging.getLogger("keepstep")

_AGENT = "KEEPSTEP_AGENT"
_NODE = "KEEPSTEP_NODE"
_HOST = "KEEPSTEP_HOST"
_TIMEOUT = timedelta(minutes=30)


class Membership:
    """A place in a job, and what has to be given up at the end. `guard` is None where nobody protects the job.

    In a standby that rehearses, `sandbox` is what it does so in, and there is no guard.
    """

    def __init__(
        self, *, rank: int, world: int, attempt: int, guard: Guard | None, sandbox: Sandbox | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.attempt = attempt
        self.guard = guard
        self.sandbox = sandbox
        self.locally = contextlib.ExitStack()

    def close(self, *, orderly: bool) -> None:
        """Leave: links say goodbye (`orderly`), the process group is gone."""
        self.locally.close()
        if self.guard is not None:
            if orderly:
                self.guard.fabric.close()
            self.guard.link.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        connect_fabric(None)


class Warm(msgspec.Struct):
    """A standby's open line to its agent while it has no role; `welcome` is set once it got one.

    `rehearsals` are those of a standby (None in other processes), `records` says that the first steps are recorded.
    """

    link: AgentLink
    doors: Doors
    recorder: Recorder
    said: bool = False
    records: bool = False
    welcome: Welcome | None = None
    rehearsals: Rehearsals | None = None


_warm: Warm | None = None


def become_member() -> Membership:
    """Take a place in the job as the environment of this process says; see `join`."""
    if dist.is_initialized():
        raise UsageError("join() after init_process_group()", remedy="let join() set up torch.distributed")
    process_group.register()
    if os.environ.get(_AGENT):
        return _protected(_warm or _connect())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _log.warning("keepstep: no agent (not started by `keepstep run`): the job runs unprotected")
        dist.init_process_group("keepstep", timeout=_TIMEOUT)
        return Membership(rank=dist.get_rank(), world=dist.get_world_size(), attempt=0, guard=None)
    _log.warning("keepstep: neither `keepstep run` nor torchrun started this process: it runs alone, unprotected")
    dist.init_process_group("keepstep", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    return Membership(rank=0, world=1, attempt=0, guard=None)


def warm_up_membership() -> Warm:
    """In a standby: open the line to the agent early, so that `join()` finds it."""
    global _warm
    _warm = _connect()
    _warm.rehearsals = Rehearsals(_warm.link, now=_warm.recorder.monotonic_s)
    return _warm


def _connect() -> Warm:
    wire = Wire.connect(os.environ[_AGENT])
    recorder = Recorder.of_descriptor(wire.receive_descriptor(timeout_s=10.0))
    node = os.environ.get(_NODE) or socket.gethostname()
    doors = Doors(member=recorder.member, node=node, host=os.environ.get(_HOST) or "127.0.0.1")
    return Warm(link=AgentLink(wire, member=recorder.member), doors=doors, recorder=recorder)


def await_role(warm: Warm) -> Welcome | Sandbox:
    """Say hello (once) and wait for a role, or for one to rehearse. Raises SystemExit when the job ends before."""
    if warm.welcome is not None:
        return warm.welcome
    if warm.rehearsals is not None and warm.rehearsals.sandbox is not None:
        return warm.rehearsals.sandbox
    if not warm.said:
        warm.said = True
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        warm.link.start()
        warm.link.say(_hello(warm))
    order = _next_role(warm)
    if isinstance(order, Sandbox):
        os.environ.update(rehearsed_variables(order.kind, world=order.world))
        return order
    if not isinstance(order, Welcome):
        _log.info("the job ended before this process became a member: %s", order.why)
        raise SystemExit(0)
    warm.welcome = order
    _tell_environment(order)
    return order


def _next_role(warm: Warm) -> Welcome | Stop | Fence | Sandbox:
    """The next order that ends the wait, or the next rehearsal."""
    while True:
        sandbox = None if warm.rehearsals is None else warm.rehearsals.next()
        if sandbox is not None:
            return sandbox
        order = warm.link.next_order()
        if isinstance(order, (Welcome, Stop, Fence)):
            return order
        if isinstance(order, RecordStep):
            warm.records = True
        elif isinstance(order, WarmUp) and warm.rehearsals is not None:
            warm.rehearsals.take(order)


def _hello(warm: Warm) -> Hello:
    return Hello(
        member=warm.link.member,
        rank=int(os.environ.get("RANK", "-1")),
        world=int(os.environ.get("WORLD_SIZE", "0")),
        pid=os.getpid(),
        address=warm.doors.address,
        keepstep_version=__version__,
        torch_version=str(torch.__version__),
    )


def _tell_environment(welcome: Welcome) -> None:
    """torchrun's variables for scripts that read them; a standby learns its own only now."""
    nodes = [welcome.roster[rank].node for rank in sorted(welcome.roster)]
    own = welcome.roster[welcome.rank].node
    os.environ.update(
        GROUP_RANK=str(list(dict.fromkeys(nodes)).index(own)),
        LOCAL_WORLD_SIZE=str(nodes.count(own)),
        RANK=str(welcome.rank),
        WORLD_SIZE=str(welcome.world),
        LOCAL_RANK=str(welcome.local_rank),
        ROLE_RANK=str(welcome.rank),
    )


def _protected(warm: Warm) -> Membership:
    try:
        role = await_role(warm)
    except PeerLost as error:
        raise EnvironmentProblem("the agent of this node is gone", where=os.environ[_AGENT]) from error
    return _rehearsing(role) if isinstance(role, Sandbox) else _joined(warm, role)


def _rehearsing(sandbox: Sandbox) -> Membership:
    """A standby's place in the sandbox."""
    connect_fabric(sandbox.fabric)
    rank, world = sandbox.kind.rank, sandbox.world
    dist.init_process_group("keepstep", store=dist.HashStore(), rank=rank, world_size=world, timeout=_TIMEOUT)
    return Membership(rank=rank, world=world, attempt=0, guard=None, sandbox=sandbox)


def _answers(warm: Warm, rank: int) -> Replay:
    """What the collectives of a joiner's set-up give it."""
    if warm.rehearsals is None:
        return Replay()
    warm.rehearsals.prepare(rank)
    return warm.rehearsals.replay_for(rank)


def _joined(warm: Warm, welcome: Welcome) -> Membership:
    """A member's place in the job."""
    place = Place(rank=welcome.rank, world=welcome.world, generation=welcome.generation)
    directory = RosterDirectory(welcome.roster)
    fabric = Fabric(warm.doors, place, secret=welcome.secret, directory=directory, protected=True, on_loss=None)
    warm.recorder.identify(rank=welcome.rank)
    fabric.record_into(warm.recorder.address, warm.recorder.size)
    if welcome.joiner:
        HEARING.replay = _answers(warm, welcome.rank)
        fabric.go_local()
    else:
        fabric.start_watch()
    connect_fabric(fabric)
    asks = welcome.joiner or welcome.attempt > 0
    state = MemberState(rank=welcome.rank, generation=welcome.generation, epoch=welcome.epoch, joiner=asks)
    guard = Guard(fabric, warm.link, recorder=warm.recorder, state=state)
    guard.rehearsing = welcome.joiner
    if warm.records and not welcome.joiner:
        guard.step_recorder.start()
    dist.init_process_group(
        "keepstep", store=dist.HashStore(), rank=welcome.rank, world_size=welcome.world, timeout=_TIMEOUT
    )
    membership = Membership(rank=welcome.rank, world=welcome.world, attempt=welcome.attempt, guard=guard)
    if welcome.joiner:
        assert HEARING.replay is not None
        local = objects_are_none(HEARING.replay, applies=lambda: fabric.mode is Mode.LOCAL)
        membership.locally.enter_context(local)
    return membership
