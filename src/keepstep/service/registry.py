"""The jobs of one controller and the agents that serve them from other nodes."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from keepstep import __version__
from keepstep.control.job_state import Directed
from keepstep.errors import KeepstepError, MembershipError, PeerLost, TransportError, UsageError, VersionMismatch
from keepstep.records.canary import canary_steps, name_without_canary
from keepstep.records.domain_messages import NodeLost
from keepstep.records.messages import Assignment, Enlist, Fact, Message, StartFailed, StartMember, Stop
from keepstep.service.background import background
from keepstep.service.controller import JobShell
from keepstep.store.remote_peer import Envelope, RemotePeer

__all__ = ["Registry"]

_ENLIST_S = 10.0


class _Served(msgspec.Struct):
    """A job, what its agents are told to run, the link to each by node, and the nodes whose agents are to come back
    to this controller. `agents` names the process at the other end of each link. `outside` wait for the end of a canary
    that has its nodes."""

    shell: JobShell
    assignment: Assignment
    links: dict[str, RemotePeer]
    awaited: set[str]
    agents: dict[str, str] = {}
    outside: list[RemotePeer] = []


class Registry:
    """Jobs by name. Give `attend` to the server; use `send` as a shell's way to its agents."""

    def __init__(self) -> None:
        """No job yet."""
        self._jobs: dict[str, _Served] = {}
        self._canaries: dict[str, Stop] = {}
        self._left: set[asyncio.Task[None]] = set()

    def add(self, shell: JobShell, assignment: Assignment) -> frozenset[str]:
        """Serve one more job. Of one that was taken over, the agents of the returned nodes are to come back; nodes that
        were lost before are not among them. Raises UsageError if its name is taken."""
        if assignment.job in self._jobs:
            raise UsageError(f"job {assignment.job} is served already", remedy="give it another name")
        awaited = frozenset(node.name for node in shell.state.nodes if not node.gone)
        self._jobs[assignment.job] = _Served(shell, assignment, {}, set(awaited))
        return awaited

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
        """Serve one agent until it leaves; its members are lost then. Where nothing comes through to it any more, it
        calls again, by chance over another way; the link that it left ends then, and nobody is lost."""
        try:
            envelope = await asyncio.wait_for(peer.receive(), _ENLIST_S)
            served, node = self._enlist(envelope)
        except TimeoutError:
            return
        except KeepstepError as error:
            with contextlib.suppress(PeerLost):
                await peer.send(Envelope("", "", Stop(0, error.exit_code, str(error))))
            return
        if node not in served.awaited and node not in served.links and _has_its_nodes(served):
            await _keep_outside(served, peer)
            return
        self._take(served, envelope.message, peer=peer)
        try:
            self._welcome(served, envelope.message, peer=peer)
            while True:
                envelope = await peer.receive()
                if not isinstance(envelope.message, Fact):
                    raise PeerLost("an agent gave an order", where=peer.where)
                served.shell.feed(envelope.message, node=node, member=envelope.member, number=envelope.number)
        finally:
            if served.links.get(node) is peer:
                del served.links[node]
                _lose_node(served.shell, node, why=f"the link to its agent at {peer.where} ended")
                if not _has_its_nodes(served):
                    _call_in(served)

    def _take(self, served: _Served, enlist: Message, *, peer: RemotePeer) -> None:
        """From here on this is the link to the node; one that its agent left ends."""
        assert isinstance(enlist, Enlist)
        old = served.links.get(enlist.node)
        served.links[enlist.node], served.agents[enlist.node] = peer, enlist.agent
        if old is not None:
            task = background(old.close())
            self._left.add(task)
            task.add_done_callback(self._left.discard)

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
        """Tell the agents of a job that it is over and forget it. Those outside a canary hear it too, and those that
        come yet: with code 0 they are to come again, for the job itself."""
        served = self._jobs.pop(job)
        stop = Stop(served.shell.state.epoch, code, why)
        if canary_steps(job):
            self._canaries[job] = stop
        for node, peer in (*served.links.items(), *(("", one) for one in served.outside)):
            with contextlib.suppress(PeerLost, TransportError):
                await peer.send(Envelope(node, "", stop))

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
        if name not in self._jobs:
            self._refuse_late(fact.job)
        if name not in self._jobs or (not fact.job and len(self._jobs) > 1):
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"no job {fact.job!r} here", remedy=f"give --job, one of: {known}")
        served = self._jobs[name]
        again = fact.node in served.links and fact.agent != "" and fact.agent == served.agents[fact.node]
        if fact.orders >= 0 and fact.node not in served.awaited and not again:
            raise UsageError(f"node {fact.node} was given up", remedy="start a new agent there")
        if fact.orders < 0 and fact.node in served.awaited:
            what = f"the earlier agent of node {fact.node} is to come back: job {name} was taken over"
            raise UsageError(what, remedy="if it is gone, start this one again after controller_patience_s")
        if fact.orders >= 0:
            return served, fact.node
        if fact.node in served.links:
            raise UsageError(f"node {fact.node} is in job {name} already", remedy="give every agent its own --node")
        if served.shell.state.phase in ("ending", "done") and not _has_its_nodes(served):
            raise UsageError(f"job {name} is ending", remedy="an agent can join a job while it runs")
        return served, fact.node

    def _refuse_late(self, asked: str) -> None:
        """Raise MembershipError with the exit code of the canary of job `asked`, if there was one."""
        for job, stop in self._canaries.items():
            if asked in ("", name_without_canary(job)):
                error = MembershipError(f"{job} is over: {stop.why}")
                error.exit_code = stop.code
                raise error


def _envelope(directed: Directed) -> Envelope:
    return Envelope(directed.node, directed.member, directed.order, directed.number)


def _lose_node(shell: JobShell, node: str, *, why: str) -> None:
    """The link to an agent is gone: it ends its processes, so they are lost, all at once."""
    if not shell.done.is_set():
        shell.feed(NodeLost(node, why), node=node)


# ---------------------------------------------------------------- canaries


def _has_its_nodes(served: _Served) -> bool:
    """True for a canary that needs no further agent: it has no standbys, and replaces nobody."""
    if not canary_steps(served.assignment.job):
        return False
    state = served.shell.state
    return state.phase != "gathering" or len(served.links) >= state.spec.nnodes


async def _keep_outside(served: _Served, peer: RemotePeer) -> None:
    """Let an agent wait for its answer until the canary is over or needs it, or the agent leaves."""
    served.outside.append(peer)
    try:
        await peer.receive()
    finally:
        served.outside.remove(peer)


def _call_in(served: _Served) -> None:
    """A canary lost an agent before it began: those outside are to come again."""
    for peer in served.outside:
        with contextlib.suppress(PeerLost, TransportError):
            peer.post(Envelope("", "", Stop(0, 0, "the canary needs another node")))
