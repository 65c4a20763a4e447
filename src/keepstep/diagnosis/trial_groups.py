"""Groups and meshes of ranks under trial: every member has to make the same ones in the same order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from keepstep.diagnosis.hang_words import listed
from keepstep.records.trial import GroupAsked, MeshAsked, Trace, TrialFinding, place_of

__all__ = ["GroupKey", "agreed_groups", "group_findings", "ranks_words"]

GroupKey = tuple[tuple[int, ...], int]
"""Global ranks (empty: the whole world), and how many groups of the same ranks were made before."""

_SHOWN = 8


def ranks_words(ranks: Sequence[int]) -> str:
    """The members of a group in short."""
    if not ranks:
        return "the whole world"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return (
        ("rank " if len(ranks) == 1 else "ranks ")
        + shown
        + (f", ... ({len(ranks)} in all)" if len(ranks) > _SHOWN else "")
    )


def group_findings(traces: Sequence[Trace]) -> list[TrialFinding]:
    """Where the ranks do not make the same groups in the same order, and where a member does not make its own."""
    meshes = _meshes(traces)
    found = [] if meshes else _in_order({trace.rank: _made(trace) for trace in traces}, traces)
    return [*meshes, *found, *_alone(traces)]


def agreed_groups(traces: Sequence[Trace]) -> dict[int, dict[int, GroupKey]]:
    """For each rank the keys of its groups, by number, as far as all ranks made the same."""
    made = {trace.rank: _made(trace) for trace in traces}
    limit = _first_difference({rank: [_what(one) for one in groups] for rank, groups in made.items()})
    found: dict[int, dict[int, GroupKey]] = {}
    for trace in traces:
        times: Counter[tuple[int, ...]] = Counter()
        keys: dict[int, GroupKey] = {}
        together = 0
        for number, group in enumerate(trace.groups):
            if limit is None or group.alone or together < limit:
                keys[number] = (group.ranks, times[group.ranks])
            times[group.ranks] += 1
            together += not group.alone
        found[trace.rank] = keys
    return found


def _made(trace: Trace) -> list[GroupAsked]:
    return [group for group in trace.groups if not group.alone]


def _what(group: GroupAsked) -> tuple[int, ...]:
    return group.ranks


def _first_difference(lists: Mapping[int, Sequence[object]]) -> int | None:
    """The lowest index at which two lists that reach it hold different things."""
    longest = max((len(one) for one in lists.values()), default=0)
    for index in range(longest):
        if len({one[index] for one in lists.values() if index < len(one)}) > 1:
            return index
    return None


def _in_order(made: Mapping[int, list[GroupAsked]], traces: Sequence[Trace]) -> list[TrialFinding]:
    index = _first_difference({rank: [_what(one) for one in groups] for rank, groups in made.items()})
    by_rank = {trace.rank: trace for trace in traces}
    if index is None:
        return _too_few(made, by_rank)
    opinions: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, groups in made.items():
        if index < len(groups):
            opinions[groups[index].ranks].append(rank)
    said = sorted(opinions.items(), key=lambda one: len(one[1]))
    words = []
    for ranks, who in said:
        place = place_of(by_rank[who[0]], made[who[0]][index].site)
        words.append(f"one of {ranks_words(ranks)} on {listed(who)} at {place}")
    odd = [rank for _, who in said[:-1] for rank in who]
    clear = len(said[0][1]) < len(said[-1][1])
    return [
        TrialFinding(
            kind="groups_disagree",
            ranks=tuple(sorted(odd if clear else made)),
            sites=_places(said, made, by_rank=by_rank, index=index),
            what=f"group {index} is not the same on all ranks: " + "; ".join(words[:4]),
            remedy="every rank has to call new_group for the same groups in the same order, members or not",
        )
    ]


def _places(
    said: Sequence[tuple[tuple[int, ...], list[int]]],
    made: Mapping[int, list[GroupAsked]],
    *,
    by_rank: Mapping[int, Trace],
    index: int,
) -> tuple[str, ...]:
    places = (place_of(by_rank[who[0]], made[who[0]][index].site) for _, who in said)
    return tuple(dict.fromkeys(place for place in places if place))


def _too_few(made: Mapping[int, list[GroupAsked]], by_rank: Mapping[int, Trace]) -> list[TrialFinding]:
    longest = max(made, key=lambda rank: len(made[rank]), default=None)
    if longest is None:
        return []
    most = len(made[longest])
    short = sorted(rank for rank, groups in made.items() if len(groups) < most and by_rank[rank].whole)
    if not short:
        return []
    index = min(len(made[rank]) for rank in short)
    group = made[longest][index]
    place = place_of(by_rank[longest], group.site)
    return [
        TrialFinding(
            kind="group_not_made",
            ranks=tuple(short),
            sites=(place,),
            what=f"the group of {ranks_words(group.ranks)}, made at {place} on "
            f"{listed([rank for rank in made if len(made[rank]) > index])}, is not made on {listed(short)}",
            remedy="call new_group on every rank, or use_local_synchronization=True on all of its members",
        )
    ]


def _alone(traces: Sequence[Trace]) -> list[TrialFinding]:
    """Groups that only their members make: each sampled member has to."""
    times: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    sites: dict[tuple[int, ...], str] = {}
    for trace in traces:
        for group in trace.groups:
            if group.alone and group.ranks:
                times[group.ranks][trace.rank] += 1
                sites.setdefault(group.ranks, place_of(trace, group.site))
    found = []
    for ranks, made in times.items():
        most = max(made.values())
        short = [t.rank for t in traces if t.rank in ranks and t.whole and made.get(t.rank, 0) < most]
        if short:
            found.append(
                TrialFinding(
                    kind="group_not_made",
                    ranks=tuple(short),
                    sites=(sites[ranks],),
                    what=f"the group of {ranks_words(ranks)}, made by its members at {sites[ranks]}, is not made on "
                    f"{listed(short)}",
                    remedy="call new_group on every member of the group",
                )
            )
    return found


def _meshes(traces: Sequence[Trace]) -> list[TrialFinding]:
    shapes = {trace.rank: [(mesh.shape, mesh.names) for mesh in trace.meshes] for trace in traces}
    index = _first_difference(shapes)
    if index is None:
        return []
    meshes: dict[int, tuple[Trace, MeshAsked]] = {
        trace.rank: (trace, trace.meshes[index]) for trace in traces if index < len(trace.meshes)
    }
    opinions: dict[object, list[int]] = defaultdict(list)
    for rank, (_, mesh) in meshes.items():
        opinions[mesh.shape, mesh.names].append(rank)
    said = sorted(opinions.values(), key=len)
    words = []
    for who in said:
        trace, mesh = meshes[who[0]]
        size = " x ".join(map(str, mesh.shape))
        names = f" ({', '.join(mesh.names)})" if mesh.names else ""
        words.append(f"{listed(who)}: {size}{names} at {place_of(trace, mesh.site)}")
    clear = len(said[0]) < len(said[-1])
    return [
        TrialFinding(
            kind="meshes_disagree",
            ranks=tuple(sorted(rank for who in (said[:-1] if clear else said) for rank in who)),
            sites=tuple(dict.fromkeys(place_of(*_site(meshes[who[0]])) for who in said)),
            what="the ranks lay out different meshes: " + "; ".join(words[:4]),
            remedy="compute the mesh from the world size alone, not from the rank",
        )
    ]


def _site(pair: tuple[Trace, MeshAsked]) -> tuple[Trace, int]:
    return pair[0], pair[1].site
