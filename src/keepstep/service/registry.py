"""The jobs of one controller and the agents that serve them from other nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec

from keepstep import __version__
from keepstep.control.job_state import Directed
from keepstep.errors import KeepstepError, PeerLost, TransportError, UsageError, VersionMismatch
from keepstep.records.canary import name_without_canary
from keepstep.records.domain_messages import NodeLost
from keepstep.records.messages import Assignment, Enlist, Fact, Message, StartFailed, StartMember, Stop
from keepstep.service.controller import JobShell
from keepstep.store.remote_peer import Envelope, RemotePeer

__all__ = ["Registry"]

_ENLIST_S = 10.0


class _Served(msgspec.Struct):
    """A job, what its agents are told to run, the link to each by node, and the nodes whose agents are to come back
    to this controller."""

    shell: JobShell
    assignment: Assignment
    links: dict[str, RemotePeer]
    awaited: set[str]


class Registry:
    """Jobs by name. Give `attend` to the server; use `send` as a shell's way to its agents."""

    def __init__(self) -> None:
        """No job yet."""
        self._jobs: dict[str, _Served] = {}

    def add(self, shell: JobShell, assignment: Assignment, *, awaited: Iterable[str] = ()) -> None:
        """Serve one more job; the agents of the nodes `awaited` served an earlier controller. Raises UsageError if its
        name is taken."""
        if assignment.job in self._jobs:
            raise UsageError(f"job {assignment.job} is served already", remedy="give it another name")
        self._jobs[assignment.job] = _Served(shell, assignment, {}, set(awaited))

    def send(self, job: str, directed: Directed) -> None:
        """Deliver an order; where the agent is gone, a start fails and everything else is void."""
        served = self._jobs[job]
        order = directed.order
        if directed.node in served.awaited:
            return  # it asks for what it missed when it comes back
        try:
            served.links[directed.node].post(_envelope(directed))
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
            self._welcome(served, envelope.message, peer=peer)
            while True:
                envelope = await peer.receive()
                if not isinstance(envelope.message, Fact):
                    raise PeerLost("an agent gave an order", where=peer.where)
                served.shell.feed(envelope.message, node=node, member=envelope.member, number=envelope.number)
        finally:
            del served.links[node]
            _lose_node(served.shell, node, why=f"the link to its agent at {peer.where} ended")

    def _welcome(self, served: _Served, enlist: Message, *, peer: RemotePeer) -> None:
        """Tell an agent what to run; one that comes back gets what it missed, and hears which of its facts are here."""
        assert isinstance(enlist, Enlist)
        missed = served.shell.sent.after(enlist.node, enlist.orders) if enlist.orders >= 0 else []
        served.awaited.discard(enlist.node)
        if enlist.orders < 0:  # another agent than the one that was there before: its facts count from 1
            served.shell.heard.pop(enlist.node, None)
        known = served.shell.heard.get(enlist.node, 0)
        peer.post(Envelope(enlist.node, "", msgspec.structs.replace(served.assignment, facts=known)))
        for directed in missed:
            peer.post(_envelope(directed))

    def give_up(self, job: str) -> None:
        """Agents that have not come back by now are gone, with their members."""
        served = self._jobs.get(job)
        while served is not None and served.awaited:
            _lose_node(served.shell, served.awaited.pop(), why="its agent did not come back to the new controller")

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
        name = next((job for job in self._jobs if name_without_canary(job) == fact.job), fact.job)
        name = name or next(iter(self._jobs), "")
        if name not in self._jobs or (not fact.job and len(self._jobs) > 1):
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"no job {fact.job!r} here", remedy=f"give --job, one of: {known}")
        served = self._jobs[name]
        if fact.orders >= 0 and fact.node not in served.awaited:
            raise UsageError(f"node {fact.node} was given up", remedy="start a new agent there")
        if fact.orders < 0 and fact.node in served.awaited:
            raise UsageError(f"node {fact.node} is in job {name} already", remedy="give every agent its own --node")
        if fact.orders >= 0:
            return served, fact.node
        if fact.node in served.links:
            raise UsageError(f"node {fact.node} is in job {name} already", remedy="give every agent its own --node")
        if served.shell.state.phase in ("ending", "done"):
            raise UsageError(f"job {name} is ending", remedy="an agent can join a job while it runs")
        return served, fact.node


def _envelope(directed: Directed) -> Envelope:
    return Envelope(directed.node, directed.member, directed.order, directed.number)


def _lose_node(shell: JobShell, node: str, *, why: str) -> None:
    """The link to an agent is gone: it ends its processes, so they are lost, all at once."""
    if not shell.done.is_set():
        shell.feed(NodeLost(node, why), node=node)
