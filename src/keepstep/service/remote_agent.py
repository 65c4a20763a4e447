"""`keepstep agent`: this node's part of a job that a controller elsewhere decides about."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from keepstep import __version__
from keepstep.errors import EnvironmentProblem, KeepstepError, MembershipError, PeerLost
from keepstep.records.canary import canary_steps, name_without_canary
from keepstep.records.domain_messages import NodeDomains, NodeLost
from keepstep.records.messages import AgentHello, Assignment, Order, Stop
from keepstep.service.agent import Agent, AgentPlan
from keepstep.service.agent_line import AgentRequest, Line, enlist
from keepstep.service.clock import Clock, SystemClock
from keepstep.service.domain_labels import labels_of_flags, labels_of_this_node
from keepstep.service.job_host import JobPlan, run_facts
from keepstep.service.launcher import checked_script
from keepstep.service.logs import close_logs, open_logs
from keepstep.service.output import Console
from keepstep.service.ports import free_ports
from keepstep.service.run_directory import CANARY_FOLDER, RunDirectory
from keepstep.service.stop_signals import StopSignals
from keepstep.service.token import read_token
from keepstep.store.remote import connect_remote
from keepstep.store.remote_peer import RemotePeer

__all__ = ["AgentRequest", "admitted", "own_host", "run_agent"]

_PORTS = 16
_LEAVE_S = 5.0
_AGAIN_S = 0.2


def run_agent(request: AgentRequest) -> int:
    """Serve one job to its end; the job's exit code. Raises KeepstepError where the controller refuses or is gone."""
    labels_of_flags(request.labels)
    token_file = request.settings.token_file
    token = read_token(Path(token_file) if token_file else None)
    return asyncio.run(_serve(request, token))


def own_host(controller: str) -> str:
    """The address of this node that faces the controller (no packet is sent). Raises EnvironmentProblem."""
    host, _, port = controller.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"no way to the controller: {error}", where=controller) from error


async def _serve(request: AgentRequest, token: str) -> int:
    again = False
    while True:
        found = await StopSignals().or_result(admitted(request, token, again=again))
        if isinstance(found, int):
            return found
        peer, assignment = found
        try:
            code = await _work(request, assignment, line=Line(request, peer=peer, token=token))
        finally:
            await peer.close()
        if code or not canary_steps(assignment.job):
            return code
        again = True


async def admitted(request: AgentRequest, token: str, *, again: bool = False) -> tuple[RemotePeer, Assignment]:
    """The line to the controller and what it assigns, as soon as it takes this node. It may not be there yet, or in the
    midst of a canary; `again`: this node was in that canary.

    Raises EnvironmentProblem where no controller comes in time, MembershipError where it refuses."""
    while True:
        peer = await _reached(request, token, again=again)
        try:
            return peer, await enlist(peer, request, orders=-1)
        except PeerLost:
            again = True
        except KeepstepError:
            await peer.close()
            raise
        await peer.close()
        await asyncio.sleep(_AGAIN_S)


async def _reached(request: AgentRequest, token: str, *, again: bool) -> RemotePeer:
    """A controller, waiting for one if need be. At first what listens there must be one; between a canary and its job
    anything may."""
    settings = request.settings
    trouble: KeepstepError | None = None
    try:
        async with asyncio.timeout(settings.controller_patience_s):
            while True:
                try:
                    return await connect_remote(request.controller, token=token, silence_s=settings.silence_s)
                except EnvironmentProblem as error:
                    if trouble is None:
                        _say_waiting(request, error)
                    trouble = error
                except MembershipError as error:
                    if not again:
                        raise
                    trouble = error
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError as error:
        what = f"no controller came within {settings.controller_patience_s:g} s"
        what = f"the job did not begin after its canary: {what}" if again else what
        why = f" ({trouble.what})" if trouble is not None else ""
        remedy = "see the controller" if again else "is `keepstep controller` running there, and reachable?"
        raise EnvironmentProblem(f"{what}{why}", where=request.controller, remedy=remedy) from error


def _say_waiting(request: AgentRequest, error: KeepstepError) -> None:
    patience_s = request.settings.controller_patience_s
    console = Console()
    console.say(f"keepstep: {error.what} [{error.where}]; {patience_s:g} s for a controller to come", error=True)
    console.close()


async def _work(request: AgentRequest, assignment: Assignment, *, line: Line) -> int:
    checked_script(assignment.script)
    settings = request.settings
    path = request.directory or Path(settings.run_root) / f"{name_without_canary(assignment.job)}-{request.node}"
    if canary_steps(assignment.job):
        path /= CANARY_FOLDER
    directory = RunDirectory(path, reserve_bytes=settings.reserve_bytes)
    console = Console()
    try:
        open_logs(settings.log_level, console=console, directory=directory.logs)
        plan = JobPlan(assignment.job, assignment.script, assignment.arguments, 1, settings)
        clock = SystemClock()
        directory.publish(run_facts(plan, created=clock.wall(), control=""))
        console.say(f"keepstep: node {request.node} of job {assignment.job}, run directory {path}", error=True)
        line.console = console
        return await _obey(request, assignment, line=line, directory=path, clock=clock)
    finally:
        close_logs()
        console.close()
        directory.close()


async def _obey(request: AgentRequest, assignment: Assignment, *, line: Line, directory: Path, clock: Clock) -> int:
    host = request.address or own_host(request.controller)
    plan = AgentPlan(assignment.job, request.node, assignment.script, assignment.arguments, directory, host)
    assert line.console is not None
    agent = Agent(plan, line.say, settings=request.settings, clock=clock, console=line.console)
    stopped, over = StopSignals(), asyncio.Event()
    try:
        await agent.open()
        line.say("", NodeDomains(request.node, labels_of_this_node(request.labels)))
        hello = AgentHello(request.node, assignment.slots, assignment.standbys, __version__, host, free_ports(_PORTS))
        line.say("", hello)
        return await stopped.or_result(_follow(agent, line, over=over))
    finally:
        if not over.is_set():  # one loss, said before the processes end one by one
            line.say("", NodeLost(request.node, "its agent was stopped"))
        await agent.close(grace_s=_LEAVE_S)
        await line.close()


async def _follow(agent: Agent, line: Line, *, over: asyncio.Event) -> int:
    """Carry out orders until the job is `over`. Raises EnvironmentProblem if the controller goes away for too long."""
    while True:
        envelope = await line.next_order()
        order = envelope.message
        if isinstance(order, Stop) and not envelope.member:
            over.set()
            return order.code
        if isinstance(order, Order):
            agent.obey(envelope.member, order)
