"""Members of a group that disagree about a collective: another operation, another element type, another size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

from keepstep.records.evidence import GroupProgress, Signature
from keepstep.records.finding import Finding, Suspect

__all__ = ["mismatches"]

_SAME_INPUT = frozenset(
    {"all_reduce", "allreduce", "all_reduce_barrier", "broadcast", "reduce", "all_gather_base", "allgather_base"}
    | {"all_gather_into_tensor", "reduce_scatter_base", "reduce_scatter_tensor", "reducescatter"}
)
"""Operations whose inputs have the same number of elements on every member."""

_SHOWN = 8


def mismatches(groups: Iterable[GroupProgress]) -> list[Finding]:
    """One finding for each group in which members recorded different collectives under one sequence number.

    The first such sequence counts: after it everything of the group is shifted. The minority is suspected; if there is
    none (two against two), all are, as one set.
    """
    found = []
    for group in groups:
        first = _first_difference(group)
        if first is not None:
            found.append(_finding(group, first[0], opinions=first[1]))
    return found


def _first_difference(group: GroupProgress) -> tuple[int, dict[tuple[object, ...], list[int]]] | None:
    """The lowest sequence at which signatures differ, and the ranks by what they think it is."""
    remembered: dict[int, dict[int, Signature]] = defaultdict(dict)
    for position in group.positions:
        for sequence, signature in position.signatures.items():
            remembered[sequence][position.rank] = signature
    for sequence in sorted(remembered):
        opinions: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, signature in remembered[sequence].items():
            opinions[_essence(signature)].append(rank)
        if len(opinions) > 1 and len(known := _without_unknown(opinions)) > 1:
            return sequence, known
    return None


def _without_unknown(opinions: dict[tuple[object, ...], list[int]]) -> dict[tuple[object, ...], list[int]]:
    """The opinions without those that may be another one of which less is told, as where a line was cut off."""
    return {
        essence: ranks
        for essence, ranks in opinions.items()
        if not any(other != essence and _is_part(essence, other) for other in opinions)
    }


def _is_part(less: tuple[object, ...], more: tuple[object, ...]) -> bool:
    """Whether nothing that `less` tells differs from `more`, which tells more."""
    if less[0] == "":
        return True
    told = [one is not None and one != "" for one in less]
    return (
        len(less) == len(more)
        and not all(told)
        and all(one == other for one, other, known in zip(less, more, told, strict=True) if known)
        and sum(told) < sum(other is not None and other != "" for other in more)
    )


def _essence(signature: Signature) -> tuple[object, ...]:
    """What must be equal on every member."""
    op = _plain(signature.op)
    if op not in _SAME_INPUT:
        return (op,)
    elements = signature.count
    if signature.sizes:
        elements = sum(prod(shape) for shape in signature.sizes)
    return (op, signature.dtype, elements, signature.root)


def _plain(op: str) -> str:
    return op.lower().strip("_").replace("-", "_")


def _finding(group: GroupProgress, sequence: int, *, opinions: dict[tuple[object, ...], list[int]]) -> Finding:
    by_size = sorted(opinions.values(), key=len)
    majority = len(by_size[-1])
    minority = [ranks for ranks in by_size if len(ranks) < majority]
    everybody = sorted(rank for ranks in by_size for rank in ranks)
    clear = bool(minority) and len(minority) == len(by_size) - 1
    suspects: tuple[tuple[Suspect, ...], ...]
    victims: tuple[int, ...]
    if clear:
        suspects = tuple((Suspect(rank=rank),) for ranks in minority for rank in sorted(ranks))
        victims = tuple(sorted(set(group.ranks or everybody) - {rank for ranks in minority for rank in ranks}))
    else:
        suspects, victims = (tuple(Suspect(rank=rank) for rank in everybody),), ()
    title = f"group {group.group}" + (f" ({group.description})" if group.description else "")
    evidence = [f"{title}, collective {sequence}: the members do not agree what it is"]
    evidence += [f"{_ranks(ranks)}: {_say(essence)}" for essence, ranks in opinions.items()]
    return Finding(
        kind="collective_mismatch",
        layer="application",
        group=group.group,
        sequence=sequence,
        suspects=suspects,
        victims=victims,
        confidence=0.95 if clear else 0.7,
        evidence=tuple(evidence[: _SHOWN + 1]),
        next_probe="compare the Python stacks of both sides at this collective: which branch did each take?",
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _say(essence: tuple[object, ...]) -> str:
    op, *rest = essence
    if not rest:
        return str(op)
    dtype, elements, root = rest
    size = "" if elements is None else f", {elements} elements"
    return f"{op}{size}" + (f" of {dtype}" if dtype else "") + ("" if root is None else f", root {root}")
