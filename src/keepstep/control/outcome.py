"""How things end: an incident that is closed, a replica that differs, a job that restarts or ends."""

from __future__ import annotations

from typing import cast

from keepstep.control.exits import PastFailure
from keepstep.control.job_state import Change, Loss
from keepstep.control.roster import Member, Status
from keepstep.control.starting import start_standby
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.events import PHASES, Finding, FindingKind, Incident, Suspect

__all__ = ["close_incident", "divergence_finding", "restart_or_end"]


def divergence_finding(turn: Turn, member: Member) -> Finding:
    """A replica whose digest differs from the others'."""
    return Finding(
        kind="state_divergence",
        job=turn.state.spec.job,
        generation=turn.state.generation,
        step=member.version,
        rank=member.rank,
        node=member.node,
        wall=turn.now,
        suspects=((Suspect(rank=member.rank),),),
        evidence=(f"digest {member.digest} at version {member.version} differs from its replicas",),
    )


def close_incident(turn: Turn) -> None:
    """Every member is through its first step: write one incident for every rank that was lost."""
    change = turn.state.change
    assert change is not None
    nobody = Loss(-1, "", "", "communication_hang", 0, change.began, change.began)
    for loss in change.lost or (nobody,):
        turn.let(incidents=turn.state.incidents + 1)
        turn.incidents.append(_incident(turn, loss, change))
        past = PastFailure(loss.rank, loss.signal, change.version)
        turn.let(past=(*turn.state.past, past))
    turn.let(phase="running", change=None, version=max(turn.state.version, change.version + 1))
    turn.because(f"incident closed: all members completed a step in generation {change.generation}")
    _refill_standbys(turn)


def _refill_standbys(turn: Turn) -> None:
    """Start as many standbys as each node has lost."""
    for node in turn.state.nodes:
        waiting = [
            m
            for m in turn.state.members.values()
            if m.rank < 0 and m.node == node.name and m.status in (Status.STARTING, Status.WARM)
        ]
        for _ in range(node.standbys - len(waiting)):
            if turn.state.broken_standbys < 3:
                start_standby(turn, node.name, "a new standby in place of the one that joined")


def _incident(turn: Turn, loss: Loss, change: Change) -> Incident:
    """The recovery as seconds from the onset; further losses during a change are part of it."""
    onset = min(loss.onset or loss.detected, loss.detected)
    reached = {name: round(change.marks[name] - onset, 6) for name in PHASES if name in change.marks}
    reached.update(onset=0.0, detected=round(loss.detected - onset, 6))
    return Incident(
        kind=cast(FindingKind, loss.kind),
        number=turn.state.incidents,
        job=turn.state.spec.job,
        attempt=turn.state.attempt,
        generation=change.generation,
        step=change.version,
        rank=loss.rank if loss.rank >= 0 else None,
        node=loss.node or None,
        member=loss.member or None,
        wall=turn.now,
        onset_wall=onset,
        steps_recomputed=max(0, change.reached - change.version),
        bytes_moved=change.bytes_moved,
        members_changed=len(change.lost),
        **reached,
    )


def restart_or_end(turn: Turn, why: str, code: int = 75) -> None:
    """End all ranks and start a new attempt, if one is left; else end the job with `code`."""
    if turn.state.attempt >= turn.state.spec.max_restarts:
        turn.end(code, f"{why}; no restart is left (--max-restarts {turn.state.spec.max_restarts})")
        return
    turn.because(f"{why}: restart {turn.state.attempt + 1} of {turn.state.spec.max_restarts}")
    turn.let(phase="restarting", change=None, generation=turn.state.generation + 1)
    for member in turn.state.members.values():
        if member.rank >= 0 and member.status is not Status.GONE:
            turn.kill(member, why, grace_s=GRACE_S)
