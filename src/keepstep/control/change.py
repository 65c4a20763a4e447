"""A membership change, level-triggered: whatever happens, look at who stands where and order what is possible next.

The order of things: fill empty ranks with standbys; stayers park; all come to one version at a step boundary; joiners
take the state of that version from every replica that has the majority's digest; where no live replica is left, all
load the newest checkpoint that all can load; everybody goes on in the new generation.
"""

from __future__ import annotations

from collections import Counter

from keepstep.control.job_state import Change
from keepstep.control.outcome import close_incident, divergence_finding, restart_or_end
from keepstep.control.roster import Member, Status, by_rank, live, standbys
from keepstep.control.starting import start_standby
from keepstep.control.turn import Turn
from keepstep.records.messages import Fetch, Find, Go, Restore, Settle, Welcome

__all__ = ["reconcile", "settle_version"]


def settle_version(parked: list[Member]) -> int:
    """The version all members come to: the highest that a live member has applied or seen agreed.

    A member that saw the agreement of step k pass knows that every member had final gradients of step k, so all can
    roll forward to k + 1; if nobody saw it, nobody has applied it and all redo step k.
    """
    return max(member.version + int(member.agreed) for member in parked)


def reconcile(turn: Turn) -> None:
    """Order whatever the present state of the change allows."""
    change = turn.state.change
    if change is None or turn.state.exit_code is not None:
        return
    if change.going:
        _finish(turn, change)
        return
    if not _fill_ranks(turn) or not _all_parked(turn):
        return
    if change.restore is not None:
        _go_when_restored(turn)
    elif change.finding:
        _restore_when_known(turn)
    else:
        _copy_state(turn)


def _stayers(turn: Turn) -> list[Member]:
    change = turn.state.change
    assert change is not None
    return [] if change.initial else [m for m in live(turn.state.members) if not m.joiner]


def _joiners(turn: Turn) -> list[Member]:
    change = turn.state.change
    assert change is not None
    return [m for m in live(turn.state.members) if m.joiner or change.initial]


def _fill_ranks(turn: Turn) -> bool:
    """Give every empty rank to a standby; True if no rank is empty."""
    change = turn.state.change
    assert change is not None
    taken = by_rank(turn.state.members)
    empty = [rank for rank in range(turn.state.spec.world) if rank not in taken]
    for rank in empty:
        lost_node = next((loss.node for loss in change.lost if loss.rank == rank), "")
        warm = sorted(standbys(turn.state.members, Status.WARM), key=lambda m: m.node != lost_node)
        if warm:
            _promote(turn, warm[0], rank)
            continue
        on_the_way = [m for m in standbys(turn.state.members) if m.status is Status.STARTING]
        if len(on_the_way) < len([r for r in range(turn.state.spec.world) if r not in by_rank(turn.state.members)]):
            start_standby(turn, lost_node, f"no standby is left for rank {rank}: a fresh process is started")
    return all(rank in by_rank(turn.state.members) for rank in range(turn.state.spec.world))


def _promote(turn: Turn, standby: Member, rank: int) -> None:
    state = turn.state
    turn.mark("standby_chosen")
    joiner = turn.put(standby, rank=rank, status=Status.JOINING, joiner=True)
    local = sum(1 for m in live(state.members) if m.node == joiner.node and m.rank < rank)
    assert state.change is not None
    order = Welcome(
        epoch=state.epoch,
        rank=rank,
        world=state.spec.world,
        local_rank=local,
        generation=state.change.generation,
        attempt=state.attempt,
        joiner=True,
        roster=turn.addresses(),
        secret=state.spec.secret,
    )
    turn.tell(joiner, order, f"standby {joiner.name} takes rank {rank}")


def _all_parked(turn: Turn) -> bool:
    """Settle the stayers once all have parked; True when they all stand at the boundary (or there are none)."""
    change = turn.state.change
    assert change is not None
    stayers = _stayers(turn)
    if not stayers:
        return True
    if any(m.answered != change.generation for m in stayers):
        return False
    if change.version < 0:
        version = settle_version(stayers)
        redone = any(not m.agreed and m.version == version for m in stayers)
        change = turn.change(version=version, reached=max(change.reached, version), redone=redone)
        turn.let(version=version)
        for member in stayers:
            turn.tell(member, Settle(turn.state.epoch, change.generation, version), f"come to version {version}")
    return all(m.status is Status.SETTLED for m in stayers)


def _copy_state(turn: Turn) -> None:
    """Send joiners to their sources; go when all have the state."""
    change = turn.state.change
    assert change is not None
    joiners = _joiners(turn)
    if any(m.status not in (Status.READY, Status.FETCHED) for m in joiners):
        return
    turn.mark("warmed")
    stayers = _stayers(turn)
    choices = {joiner.name: _sources(turn, stayers, joiner) for joiner in joiners}
    if any(not sources for sources, _ in choices.values()):
        _find(turn, "no live replica of the lost state is left: looking for a checkpoint")
        return
    for joiner in joiners:
        sources, digest = choices[joiner.name]
        if joiner.status is Status.FETCHED and (joiner.version, joiner.digest) == (change.version, digest):
            continue
        if joiner.name not in change.fetching:
            change = turn.change(fetching=change.fetching | {joiner.name})
            private = change.private.get(joiner.rank, {}).get(change.version, b"")
            order = Fetch(
                epoch=turn.state.epoch,
                generation=change.generation,
                version=change.version,
                digest=digest,
                sources=sources,
                roster=turn.addresses(),
                private=private,
            )
            turn.tell(joiner, order, f"take the state of version {change.version} from ranks {list(sources)}")
    if all(j.status is Status.FETCHED and j.version == change.version for j in joiners):
        turn.mark("copied", again=True)
        _go(turn)


def _sources(turn: Turn, stayers: list[Member], joiner: Member) -> tuple[tuple[int, ...], str]:
    """Ranks that hold the joiner's state with the digest most of them share, and that digest.

    A replica that differs from the majority is named as diverged and not used; without a majority nobody is trusted.
    """
    holders = [m for m in stayers if m.replica == joiner.replica]
    if not holders:
        return (), ""
    counts = Counter(m.digest for m in holders).most_common()
    digest, votes = counts[0]
    if len(counts) > 1:
        for member in holders:
            if member.digest != digest or votes == counts[1][1]:
                turn.findings.append(divergence_finding(turn, member))
                turn.because(f"state_divergence: rank {member.rank} differs from its replicas and is not used")
        if votes == counts[1][1]:
            return (), ""
    return tuple(m.rank for m in holders if m.digest == digest), digest


def _find(turn: Turn, why: str) -> None:
    change = turn.change(finding=True)
    for member in live(turn.state.members):
        turn.put(member, checkpoints=None)
        turn.tell(member, Find(turn.state.epoch, change.generation), why)
    turn.because(why)


def _restore_when_known(turn: Turn) -> None:
    members = live(turn.state.members)
    known = [set(m.checkpoints) for m in members if m.checkpoints is not None]
    change = turn.state.change
    assert change is not None
    if len(known) < len(members):
        return
    common = set.intersection(*known)
    if not common and not change.initial:
        restart_or_end(turn, "no live replica and no valid checkpoint that all members can load is left")
        return
    version = max(common, default=-1)
    change = turn.change(restore=version, version=max(version, 0))
    turn.let(version=max(version, 0))
    why = (
        f"all load the checkpoint of step {version}" if version >= 0 else "no checkpoint yet: start from the beginning"
    )
    turn.because(why)
    for member in members:
        turn.put(member, status=Status.JOINING if member.joiner else Status.PARKED)
        turn.tell(member, Restore(turn.state.epoch, change.generation, version), why)


def _go_when_restored(turn: Turn) -> None:
    if all(m.status is Status.SETTLED for m in live(turn.state.members)):
        turn.mark("copied", again=True)
        _go(turn)


def _go(turn: Turn) -> None:
    change = turn.change(going=True)
    roster = turn.addresses()
    replicas = {member.rank: member.replica for member in live(turn.state.members)}
    for member in live(turn.state.members):
        running = turn.put(member, status=Status.RUNNING, joiner=False)
        order = Go(turn.state.epoch, change.generation, change.version, roster, replicas)
        turn.tell(running, order, f"run on from version {change.version} in generation {change.generation}")
    turn.mark("joined", again=True)
    turn.let(generation=change.generation, phase="running" if change.initial else "changing")
    if change.initial:
        turn.let(change=None)


def _finish(turn: Turn, change: Change) -> None:
    """Close the incident when every member has completed its first step in the new generation."""
    missing = [m for m in live(turn.state.members) if m.name not in change.first_steps]
    if any(m.status is not Status.FINISHED for m in missing):
        return
    turn.mark("first_valid_step")
    close_incident(turn)
