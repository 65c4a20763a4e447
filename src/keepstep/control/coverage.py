"""What the loss of each domain would cost, before it happens: ranks, standbys and state that are left, the outcome.

A prediction by the rules of `change.py`; nothing in it is measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from keepstep.control.domains import Domains, everywhere, mirror_gaps
from keepstep.control.job_state import JobState
from keepstep.control.roster import Status, free_places, live, standbys
from keepstep.records.coverage_records import CoverageRecord, DomainLoss, LossOutcome, StateSource

__all__ = ["Placement", "dealt_placement", "live_placement", "predict"]

_WORST: tuple[LossOutcome, ...] = ("stop", "wait", "restart", "steps_recomputed", "kept_in_step")
_MOST_NOTES = 16


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Who is where. `ranks` gives each rank's node, `standbys` counts by node what is warm, `places` what is free.

    `replicas` names the state a rank holds (ranks of unknown state are not in it), `mirrors` who holds its copy. The
    newest checkpoint is at most `behind` steps old (None: there is none). `own_holders` are the ranks that keep
    what only a rank itself knows: random numbers, data position.
    """

    ranks: dict[int, str]
    domains: Domains
    standbys: dict[str, int] = {}
    places: dict[str, int] = {}
    replicas: dict[int, str] = {}
    mirrors: dict[int, int] = {}
    behind: int | None = None
    own_holders: dict[int, int] = {}
    restarts_left: int = 0
    waits: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes with something on them."""
        return tuple(sorted({*self.ranks.values(), *self.standbys, *self.places}))

    def ranks_by_node(self) -> dict[str, list[int]]:
        """As `mirror_holders` wants them."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank, node in sorted(self.ranks.items()):
            found[node].append(rank)
        return dict(found)


def dealt_placement(nodes: tuple[str, ...], world: int, *, per_node: int, standby: int, domains: Domains) -> Placement:
    """Ranks dealt to `nodes` in order as the controller does it, `per_node` on each with `standby` standbys."""
    ranks = {rank: nodes[rank // per_node] for rank in range(world)}
    return Placement(ranks=ranks, domains=domains, standbys={node: standby for node in set(ranks.values()) if standby})


def live_placement(state: JobState, *, replicas: dict[int, str], behind: int | None) -> Placement:
    """Who is where in a job that runs; `replicas` as members told, `behind` as in `Placement`."""
    told = {m.rank: m.replica for m in live(state.members) if m.replica}
    warm = Counter(m.node for m in standbys(state.members, Status.WARM))
    places = {node: free for node, free in free_places(state.nodes, state.members).items() if free}
    return Placement(
        ranks={m.rank: m.node for m in live(state.members)},
        domains=state.domains,
        standbys=dict(warm),
        places=places,
        replicas={**replicas, **told},
        behind=behind,
        restarts_left=max(0, state.spec.max_restarts - state.attempt),
        waits=state.spec.shortage_s > 0,
    )


def predict(placement: Placement) -> CoverageRecord:
    """For every domain of every node what its loss would cost, the worst first."""
    ground = _Ground(placement)
    rows = [_loss(ground, name) for name in sorted(ground.nodes_in)]
    rows.sort(key=lambda row: (_WORST.index(row.outcome), -row.steps_recomputed, -len(row.ranks), row.domain))
    notes = []
    if placement.mirrors:
        gaps = mirror_gaps(placement.mirrors, placement.ranks_by_node(), domains=placement.domains)
        notes = [f"rank {rank}: {why}" for rank, why in gaps.items()]
    more = [f"and {len(notes) - _MOST_NOTES} more ranks"] if len(notes) > _MOST_NOTES else []
    return CoverageRecord(
        domains=tuple(rows),
        everywhere=tuple(sorted(everywhere(placement.domains, placement.nodes))),
        notes=(*notes[:_MOST_NOTES], *more),
    )


class _Ground:
    """What all rows of a table are made from, gathered once: the nodes in each domain, the ranks on each node, how many
    ranks hold each state."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.nodes_in: dict[str, list[str]] = defaultdict(list)
        for node in placement.nodes:
            for name in placement.domains.of(node):
                self.nodes_in[name].append(node)
        self.ranks_on = placement.ranks_by_node()
        self.holding = Counter(placement.replicas.values())
        self.standbys, self.places = sum(placement.standbys.values()), sum(placement.places.values())


def _loss(ground: _Ground, domain: str) -> DomainLoss:
    placement, gone = ground.placement, ground.nodes_in[domain]
    lost = tuple(sorted(rank for node in gone for rank in ground.ranks_on.get(node, ())))
    row = DomainLoss(
        domain=domain,
        nodes=tuple(gone),
        ranks=lost,
        outcome="kept_in_step",
        standbys_left=ground.standbys - sum(placement.standbys.get(node, 0) for node in gone),
        places_left=ground.places - sum(placement.places.get(node, 0) for node in gone),
        sources=_sources(ground, lost),
    )
    outcome, why = _outcome(placement, row)
    steps = (placement.behind or 0) if outcome == "steps_recomputed" else 0
    return msgspec.structs.replace(row, outcome=outcome, why=why, steps_recomputed=steps)


def _sources(ground: _Ground, lost: tuple[int, ...]) -> dict[StateSource, tuple[int, ...]]:
    """The lost ranks by the best source that is left for their state."""
    placement, gone = ground.placement, set(lost)
    with_them = Counter(placement.replicas[rank] for rank in lost if rank in placement.replicas)
    found: dict[StateSource, list[int]] = defaultdict(list)
    for rank in lost:
        holder, key = placement.mirrors.get(rank, rank), placement.replicas.get(rank)
        if key is not None and ground.holding[key] > with_them[key]:
            found["replica"].append(rank)
        elif holder not in gone:
            found["mirror"].append(rank)
        else:
            found["nothing" if placement.behind is None else "checkpoint"].append(rank)
    return {source: tuple(ranks) for source, ranks in found.items()}


def _outcome(placement: Placement, row: DomainLoss) -> tuple[LossOutcome, str]:
    if not row.ranks:
        return "kept_in_step", "no rank is on it"
    missing = len(row.ranks) - row.standbys_left - row.places_left
    if missing > 0:
        what = "1 rank has" if missing == 1 else f"{missing} ranks have"
        return "wait" if placement.waits else "stop", f"{what} no standby and no free place elsewhere"
    if len(row.ranks) == len(placement.ranks) and placement.behind is not None:
        return "steps_recomputed", "all members are lost: all load the newest checkpoint"
    if "nothing" in row.sources or len(row.ranks) == len(placement.ranks):
        again: LossOutcome = "restart" if placement.restarts_left else "stop"
        return again, "no copy of the state of some ranks and no checkpoint is left: all from the beginning"
    if "checkpoint" in row.sources:
        return "steps_recomputed", "no live copy of the state of some ranks is left: all load the newest checkpoint"
    gone = set(row.ranks)
    if all(placement.own_holders.get(rank, rank) not in gone for rank in row.ranks):
        return "kept_in_step", "every lost rank has a live copy"
    if placement.behind is not None:
        return "steps_recomputed", "random numbers and data position of the lost ranks come from the newest checkpoint"
    return "kept_in_step", "with the random numbers and data position of fresh processes: results differ"
