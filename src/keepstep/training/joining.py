"""How a process becomes a member: from an agent's welcome, from torchrun's environment, or alone."""

from __future__ import annotations

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
from keepstep.records.messages import Fence, Hello, Order, Stop, Welcome
from keepstep.records.watch_messages import STACK_SIGNAL
from keepstep.store.wire import Wire
from keepstep.training import process_group
from keepstep.training.agent_link import AgentLink
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place, connect_fabric
from keepstep.training.guard import Guard
from keepstep.training.recorder import Recorder

__all__ = ["Membership", "Warm", "await_welcome", "become_member", "warm_up_membership"]

_log = logging.getLogger("keepstep")

_AGENT = "KEEPSTEP_AGENT"
_NODE = "KEEPSTEP_NODE"
_HOST = "KEEPSTEP_HOST"
_TIMEOUT = timedelta(minutes=30)


class Membership:
    """A place in a job, and what has to be given up at the end. `guard` is None where nobody protects the job."""

    def __init__(self, *, rank: int, world: int, attempt: int, guard: Guard | None) -> None:
        self.rank = rank
        self.world = world
        self.attempt = attempt
        self.guard = guard

    def close(self, *, orderly: bool) -> None:
        """Leave: links say goodbye (`orderly`), the process group is gone."""
        if self.guard is not None:
            if orderly:
                self.guard.fabric.close()
            self.guard.link.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        connect_fabric(None)


class Warm(msgspec.Struct):
    """A standby's open line to its agent while it has no role; `welcome` is set once it got one."""

    link: AgentLink
    doors: Doors
    recorder: Recorder
    said: bool = False
    welcome: Welcome | None = None


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
    return _warm


def _connect() -> Warm:
    wire = Wire.connect(os.environ[_AGENT])
    recorder = Recorder.of_descriptor(wire.receive_descriptor(timeout_s=10.0))
    node = os.environ.get(_NODE) or socket.gethostname()
    doors = Doors(member=recorder.member, node=node, host=os.environ.get(_HOST) or "127.0.0.1")
    return Warm(link=AgentLink(wire, member=recorder.member), doors=doors, recorder=recorder)


def await_welcome(warm: Warm) -> Welcome:
    """Say hello (once) and wait for a role. Raises SystemExit when the job ends before there is one."""
    if warm.welcome is not None:
        return warm.welcome
    if not warm.said:
        warm.said = True
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        warm.link.start()
        warm.link.say(_hello(warm))
    order: Order | None = warm.link.next_order()
    while not isinstance(order, (Welcome, Stop, Fence)):
        order = warm.link.next_order()
    if not isinstance(order, Welcome):
        _log.info("the job ended before this process became a member: %s", order.why)
        raise SystemExit(0)
    warm.welcome = order
    _tell_environment(order)
    return order


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
        welcome = await_welcome(warm)
    except PeerLost as error:
        raise EnvironmentProblem("the agent of this node is gone", where=os.environ[_AGENT]) from error
    place = Place(rank=welcome.rank, world=welcome.world, generation=welcome.generation)
    directory = RosterDirectory(welcome.roster)
    fabric = Fabric(warm.doors, place, secret=welcome.secret, directory=directory, protected=True, on_loss=None)
    warm.recorder.identify(rank=welcome.rank)
    fabric.record_into(warm.recorder.address, warm.recorder.size)
    if welcome.joiner:
        fabric.go_local()
    else:
        fabric.start_watch()
    connect_fabric(fabric)
    asks = welcome.joiner or welcome.attempt > 0
    state = MemberState(rank=welcome.rank, generation=welcome.generation, epoch=welcome.epoch, joiner=asks)
    guard = Guard(fabric, warm.link, recorder=warm.recorder, state=state)
    guard.rehearsing = welcome.joiner
    dist.init_process_group(
        "keepstep", store=dist.HashStore(), rank=welcome.rank, world_size=welcome.world, timeout=_TIMEOUT
    )
    return Membership(rank=welcome.rank, world=welcome.world, attempt=welcome.attempt, guard=guard)
