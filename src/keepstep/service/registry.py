"""The jobs of one controller and the agents that serve them from other nodes."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from keepstep import __version__
from keepstep.control.job_state import Directed
from keepstep.errors import KeepstepError, PeerLost, TransportError, UsageError, VersionMismatch
from keepstep.records.domain_messages import NodeLost
from keepstep.records.messages import Assignment, Enlist, Fact, StartFailed, StartMember, Stop
from keepstep.service.controller import JobShell
from keepstep.store.remote_peer import Envelope, RemotePeer

__all__ = ["Registry"]

_ENLIST_S = 10.0


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
            _lose_node(served.shell, node, why=f"the link to its agent at {peer.where} ended")

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
        if served.shell.state.phase in ("ending", "done"):
            raise UsageError(f"job {name} is ending", remedy="an agent can join a job while it runs")
        return served, fact.node


def _lose_node(shell: JobShell, node: str, *, why: str) -> None:
    """The link to an agent is gone: it ends its processes, so they are lost, all at once."""
    if not shell.done.is_set():
        shell.feed(NodeLost(node, why), node=node)
