"""Which process holds the others up, from the stacks of all of them: the one that is not in a collective."""

from __future__ import annotations

from collections import Counter

from keepstep.diagnosis.log_case import words
from keepstep.diagnosis.stack_places import StackPlace, WhereAbouts, main_threads, place_of
from keepstep.records.evidence import StackSample
from keepstep.records.finding import Finding, Layer, Suspect

__all__ = ["diagnose_stacks", "stack_layer"]

_LAYERS: dict[WhereAbouts, Layer] = {
    "data": "dataloader",
    "storage": "storage",
    "compile": "software_library",
    "lock": "storage",
    "program": "application",
}
_DOES: dict[WhereAbouts, str] = {
    "collective": "waits in a collective",
    "device": "waits for its device",
    "data": "waits for data",
    "storage": "reads or writes a file",
    "compile": "compiles",
    "lock": "waits for a file lock",
    "program": "is in the program's own code",
    "unknown": "is somewhere that its stack does not tell",
}
_SHOWN = 6
_ODD = ("data", "storage", "compile", "lock", "program")
_PAIRWISE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")

_Placed = list[tuple[StackSample, StackPlace]]


def stack_layer(stack: StackSample) -> Layer:
    """The layer in which one process stands."""
    return _LAYERS.get(place_of(stack.frames).where, "undetermined")


def diagnose_stacks(stacks: tuple[StackSample, ...], *, stalled: bool = False) -> list[Finding]:
    """Findings from stacks taken together; none without stacks. `stalled`: something else says that it hangs."""
    placed = [(stack, place_of(stack.frames)) for stack in main_threads(stacks)]
    if not placed:
        return []
    waiting = [item for item in placed if item[1].where in ("collective", "device")]
    odd = [item for item in placed if item[1].where in _ODD]
    if len(placed) < 2:
        workers = [stack for stack in stacks if any(frame.function == "_worker_loop" for frame in stack.frames)]
        waits = placed[0][1].where == "data" and (stalled or bool(workers))
        return [_starved(placed[0][0], workers) if waits else _alone(placed)]
    if not waiting:
        return [_nobody_waits(placed)]
    if not odd:
        return [_all_wait(placed)]
    if len(odd) > len(placed) // 2 and not _same_place(odd):
        return [_spread(placed)]
    by_layer: dict[WhereAbouts, _Placed] = {}
    for item in odd:
        by_layer.setdefault(item[1].where, []).append(item)
    return [_held_up(where, items, waiting=waiting, all_of=placed) for where, items in by_layer.items()]


def _suspect(stack: StackSample) -> Suspect:
    if stack.rank is not None:
        return Suspect(rank=stack.rank, node=stack.node)
    return Suspect(node=stack.node, pid=stack.pid)


def _name(stack: StackSample) -> str:
    names = (("rank", stack.rank), ("process", stack.pid if stack.rank is None else None), ("node", stack.node))
    return " on ".join(f"{what} {value}" for what, value in names if value is not None) or "a process"


def _held_up(where: WhereAbouts, items: _Placed, *, waiting: _Placed, all_of: _Placed) -> Finding:
    """Some processes are elsewhere while the others wait in collectives."""
    victims = [stack.rank for stack, _ in waiting if stack.rank is not None]
    evidence = [f"{_name(stack)} {_DOES[where]}: {_chain(stack)}" for stack, _ in items[:_SHOWN]]
    evidence.append(f"{len(waiting)} of {len(all_of)} processes wait: {_summary(waiting)}")
    if len(items) < len(all_of) - len(waiting):
        evidence.append("other processes stand elsewhere too, see the other finding")
    unnamed = [_name(stack) for stack, _ in waiting if stack.rank is None]
    if unnamed:
        evidence.append(f"only waiting: {words(unnamed)}")
    return Finding(
        kind="noncommunication_hang",
        layer=_LAYERS[where],
        suspects=tuple((_suspect(stack),) for stack, _ in items),
        victims=tuple(sorted(victims)),
        node=items[0][0].node,
        confidence=0.9 if where == "data" and len(waiting) >= len(items) else 0.75 if where != "program" else 0.65,
        evidence=tuple(evidence),
        next_probe=_PROBES[where],
    )


_PROBES: dict[WhereAbouts, str] = {
    "data": "stacks of the loader's workers of this process, and the file they read; a run with num_workers=0",
    "storage": "a second stack a minute later: does it move? State of the file system it reads or writes",
    "compile": "a second stack a minute later: compiling ends by itself; a warm cache on all ranks avoids it",
    "lock": "which process holds the lock file; a lock left from an earlier run is removed by hand",
    "program": "a second stack a minute later: does it move? Which branch did only this rank take?",
}


def _chain(stack: StackSample) -> str:
    return " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in stack.frames[:5])


def _summary(placed: _Placed) -> str:
    counts = Counter(place.operation or place.where for _, place in placed)
    return words([f"{number} in {name}" for name, number in counts.most_common(_SHOWN)])


def _same_place(placed: _Placed) -> bool:
    return len({(place.where, place.frame.function) for _, place in placed}) == 1


def _alone(placed: _Placed) -> Finding:
    stack, place = placed[0]
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(f"one stack only: {_name(stack)} {_DOES[place.where]}", _chain(stack)),
        next_probe="stacks of all ranks at the same time: only a comparison shows who holds whom up",
    )


def _starved(stack: StackSample, workers: list[StackSample]) -> Finding:
    """The only process that is shown waits for data, and somebody took its stack because it does not go on."""
    suspect = _suspect(stack)
    return Finding(
        kind="noncommunication_hang",
        layer="dataloader",
        suspects=((suspect,),) if suspect != Suspect() else (),
        confidence=0.5,
        evidence=(
            f"{_name(stack)} {_DOES['data']}: {_chain(stack)}",
            *(f"a worker of its loader: {_chain(worker)}" for worker in workers[:_SHOWN]),
            "this is one process at one moment: the stacks of the other ranks are not here",
        ),
        next_probe=_PROBES["data"],
    )


def _nobody_waits(placed: _Placed) -> Finding:
    """Nobody is in a collective: all at the same place is a stall of all, different places are normal work."""
    where = placed[0][1].where
    if _same_place(placed) and where in ("data", "storage", "lock"):
        return Finding(
            kind="noncommunication_hang",
            layer=_LAYERS[where],
            confidence=0.7,
            evidence=(f"all {len(placed)} processes stand at one place: {_chain(placed[0][0])}",),
            next_probe="what all of them share there: the file system, the data server, the lock",
        )
    return _spread(placed)


def _spread(placed: _Placed) -> Finding:
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(f"{len(placed)} processes, no common wait: {_summary(placed)}",),
        next_probe="the same stacks again a minute later: who has not moved?",
    )


def _all_wait(placed: _Placed) -> Finding:
    """All wait in collectives. One that waits in another one than all others took another way through the program."""
    sites = Counter(_site(place) for _, place in placed)
    (usual, most), rest = sites.most_common(1)[0], len(placed) - sites.most_common(1)[0][1]
    others = [item for item in placed if _site(item[1]) != usual]
    operations = {place.operation for _, place in others}
    paired = any(name in _PAIRWISE for name in (*operations, usual[0]))
    apart = len({place.operation for _, place in placed if place.operation}) > 1
    if rest and most >= 3 and rest * 3 <= most and apart and not paired:
        return Finding(
            kind="collective_mismatch",
            layer="application",
            suspects=tuple((_suspect(stack),) for stack, _ in others),
            victims=tuple(
                sorted(stack.rank for stack, place in placed if _site(place) == usual and stack.rank is not None)
            ),
            confidence=0.55,
            evidence=(
                f"{most} of {len(placed)} processes wait in {usual[0] or usual[1]}",
                *(f"{_name(stack)} waits elsewhere: {_chain(stack)}" for stack, _ in others[:_SHOWN]),
                "if both are calls of one group, the ranks took different ways through the program",
            ),
            next_probe="Flight Recorder dumps of these ranks: are the two calls of the same group and number?",
        )
    return Finding(
        kind="undetermined",
        confidence=0.3,
        evidence=(f"all {len(placed)} processes wait in communication: {_summary(placed)}", *_apart(others)),
        next_probe=(
            "Flight Recorder dumps of all ranks (which collective of which group is the first not finished?), NCCL RAS"
        ),
    )


def _apart(others: _Placed) -> list[str]:
    return [f"{_name(stack)} waits elsewhere: {_chain(stack)}" for stack, _ in others[:_SHOWN]]


def _site(place: StackPlace) -> tuple[str, str, int | None]:
    return place.operation, place.frame.function, None
