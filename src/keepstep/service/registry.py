"""The jobs of one controller and the agents that serve them from other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from keepstep import __version__
from keepstep.control.job_state import Directed
from keepstep.control.roster import Status
from keepstep.errors import KeepstepError, PeerLost, TransportError, UsageError, VersionMismatch
from keepstep.records.messages import Assignment, Enlist, Fact, MemberExited, StartFailed, StartMember, Stop
from keepstep.service.controller import JobShell
from keepstep.store.remote_peer import Envelope, RemotePeer

__all__ = ["Registry"]

_ENLIST_S = 10.0
_SIGKILL = 9
_log = logging.getLogger(__name__)


class _Served(msgspec.Struct):
    """A job, what its agents are told to run, and the link to each by node."""

    shell: JobShell
    assignment: Assignment
    links: dict[str, RemotePeer]


class Registry:
    """Jobs by name. Give `attend` to the server; use `send` as a shell's way to its agents."""

    def __init__(self) -> None:
        """No job yet."""
        self._jobs: dict[str, _Served] = {}

    def add(self, shell: JobShell, assignment: Assignment) -> None:
        """Serve one more job. Raises UsageError if its name is taken."""
        if assignment.job in self._jobs:
            raise UsageError(f"job {assignment.job} is served already", remedy="give it another name")
        self._jobs[assignment.job] = _Served(shell, assignment, {})

    def send(self, job: str, directed: Directed) -> None:
        """Deliver an order; where the agent is gone, a start fails and everything else is void."""
        served = self._jobs[job]
        order = directed.order
        try:
            served.links[directed.node].post(Envelope(directed.node, directed.member, order))
        except (KeyError, PeerLost, TransportError):
            if isinstance(order, StartMember):
                served.shell.feed(StartFailed(order.member, order.rank, "its agent is gone"), node=directed.node)

    async def attend(self, peer: RemotePeer) -> None:
        """Serve one agent until it leaves; its members are lost then."""
        try:
            envelope = await asyncio.wait_for(peer.receive(), _ENLIST_S)
            served, node = self._enlist(envelope)
        except TimeoutError:
            return
        except KeepstepError as error:
            with contextlib.suppress(PeerLost):
                await peer.send(Envelope("", "", Stop(0, error.exit_code, str(error))))
            return
        served.links[node] = peer
        try:
            await peer.send(Envelope(node, "", served.assignment))
            while True:
                envelope = await peer.receive()
                if not isinstance(envelope.message, Fact):
                    raise PeerLost("an agent gave an order", where=peer.where)
                served.shell.feed(envelope.message, node=node, member=envelope.member)
        finally:
            del served.links[node]
            _lose_node(served.shell, node)

    async def dismiss(self, job: str, *, code: int, why: str) -> None:
        """Tell the agents of a job that it is over and forget it."""
        served = self._jobs.pop(job)
        for node, peer in tuple(served.links.items()):
            with contextlib.suppress(PeerLost, TransportError):
                await peer.send(Envelope(node, "", Stop(served.shell.state.epoch, code, why)))

    def _enlist(self, envelope: Envelope) -> tuple[_Served, str]:
        """The job an agent asks for, and its node. Raises MembershipError and UsageError."""
        fact = envelope.message
        if not isinstance(fact, Enlist):
            raise UsageError("an agent must enlist first")
        if fact.keepstep_version != __version__:
            what = f"node {fact.node} runs keepstep {fact.keepstep_version}, the controller {__version__}"
            raise VersionMismatch(what, remedy="install the same version on all nodes")
        name = fact.job or next(iter(self._jobs), "")
        if name not in self._jobs or (not fact.job and len(self._jobs) > 1):
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"no job {fact.job!r} here", remedy=f"give --job, one of: {known}")
        served = self._jobs[name]
        if fact.node in served.links:
            raise UsageError(f"node {fact.node} is in job {name} already", remedy="give every agent its own --node")
        if served.shell.state.phase != "gathering":
            raise UsageError(f"job {name} has all its nodes", remedy="start as many agents as --nnodes says")
        return served, fact.node


def _lose_node(shell: JobShell, node: str) -> None:
    """The link to an agent is gone: it ends its processes, so they are lost."""
    if shell.done.is_set():
        return
    members = [m for m in shell.state.members.values() if m.node == node and m.status is not Status.GONE]
    _log.warning("agent of node %s is gone with %d processes", node, len(members))
    for member in members:
        said_hello = member.address is not None
        fact = MemberExited(member.name, member.rank, 128 + _SIGKILL, _SIGKILL, protected=said_hello)
        shell.feed(fact, node=node, member=member.name)
