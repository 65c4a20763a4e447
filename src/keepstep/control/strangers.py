"""Standbys that do not fit the job: another keepstep or torch, another world. They are refused, training goes on."""

from __future__ import annotations

from keepstep.control.roster import Member, Status, standbys
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.events import Finding, Suspect
from keepstep.records.messages import Hello

__all__ = ["misfit", "refuse_standby", "refuse_strangers"]


def misfit(turn: Turn, fact: Hello) -> str:
    """Why the process that says `fact` cannot take part; empty if it can."""
    spec, torch = turn.state.spec, turn.state.torch_version
    if fact.keepstep_version != spec.keepstep_version:
        return f"runs keepstep {fact.keepstep_version}, the controller {spec.keepstep_version}"
    if fact.world != spec.world:
        return f"believes in a world of {fact.world}, the job has {spec.world} ranks"
    return _other_torch(torch, fact.torch_version)


def _other_torch(wanted: str, found: str) -> str:
    return f"runs torch {found}, the ranks {wanted}" if wanted and found and found != wanted else ""


def refuse_strangers(turn: Turn) -> None:
    """When it is known which torch the ranks run: refuse standbys that came before and run another."""
    for standby in standbys(turn.state.members, Status.WARM):
        why = _other_torch(turn.state.torch_version, standby.torch_version)
        if why:
            refuse_standby(turn, standby, why=why)


def refuse_standby(turn: Turn, standby: Member, *, why: str) -> None:
    """End a standby that does not fit, and say which node to look at."""
    text = f"standby {standby.name} on {standby.node} {why}: it is refused; install the same versions everywhere"
    turn.let(broken_standbys=turn.state.broken_standbys + 1)
    turn.because(text)
    turn.kill(turn.put(standby, status=Status.FENCED), text, grace_s=GRACE_S)
    turn.findings.append(
        Finding(
            kind="startup_disagrees",
            layer="software_library",
            job=turn.state.spec.job,
            node=standby.node,
            wall=turn.now,
            suspects=((Suspect(node=standby.node),),),
            evidence=(text,),
        )
    )
