"""Which operation of a pipeline-parallel training step waits for which, from one trace of it.

Source of the model: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section 4,
and the description of its published data. Rebuilt from the description: operations of one step and one replica, since
all steps and replicas have the same dependencies; what replicas do together is marked as wide.

- forward and backward computation of a stage run one after the other, in the order seen;
- a send follows the computation whose result it carries; a receive precedes the computation that needs it and follows
  the computation before that one; sends and receives of one kind run one after the other on each stage;
- a send and its receive, and the operations of all stages or replicas on the same data, end after the last has begun;
- parameters are gathered before the first forward computation of their chunk; after the last computation come garbage
  collection, layer-norm and embedding gradients, gradient reduction (which may overlap the backward pass), the clipping
  of gradients across all, and the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from keepstep.errors import RecordError

__all__ = ["Op", "PipelineModel", "Seen", "model_of"]

Op = tuple[str, int, int]
"""Kind, number among its kind, stage."""

_FORWARD, _BACKWARD = "forward-compute", "backward-compute"
_GATHER, _SCATTER, _SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
_LAYERNORM, _EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
_CLIP, _OPTIMIZER, _GC = "optimizer-clip-main-grad", "optimizer", "gc"
_WIDE = (_GATHER, _SCATTER, _SEPARATE, _CLIP)
_TOLERANCE = 5e-5
"""Clocks of stages differ by about this, s."""

_PEER = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""Where the other end of a transfer is, in stages and in model chunks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One operation as it was seen in the step that serves as the pattern. Times in s from the start of the step."""

    op: Op
    start: float
    end: float
    chunk: int
    global_chunk: int


@dataclass(slots=True)
class PipelineModel:
    """Operations, what each follows, and which end together."""

    after: dict[Op, list[Op]] = field(default_factory=lambda: defaultdict(list))
    """Operations that each must wait for."""
    together: list[tuple[Op, ...]] = field(default_factory=list)
    """Sets that transfer data with each other: none ends before all have begun."""
    wide: set[Op] = field(default_factory=set)
    """Operations that wait for the same one of all replicas too."""
    order: list[tuple[Op, ...]] = field(default_factory=list)
    """All operations, those that end together as one item, each after everything it follows."""

    def chain(self, ops: Iterable[Op], first: Iterable[Op] = ()) -> None:
        """Let each of `ops` follow the one before it, and the first of them all of `first`."""
        before = list(first)
        for op in ops:
            self.after[op] += before
            before = [op]


def model_of(seen: Iterable[Seen]) -> PipelineModel:
    """The model of the step whose operations were seen. Raises RecordError if it cannot be one."""
    stages: dict[int, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
    for item in seen:
        stages[item.op[2]][item.op[0]].append(item)
    for kinds in stages.values():
        for items in kinds.values():
            items.sort(key=lambda item: (item.start, item.op[1]))
    if sorted(stages) != list(range(len(stages))) or not all(kinds[_FORWARD] for kinds in stages.values()):
        raise RecordError("the trace lacks stages or their forward computation")
    model = PipelineModel()
    for kinds in stages.values():
        for items in kinds.values():
            for item in items:
                model.after[item.op] += []
    chunks = 1 + max(item.chunk for kinds in stages.values() for item in kinds[_FORWARD])
    pairs: dict[tuple[Op, Op], list[Op]] = defaultdict(list)
    for stage, kinds in stages.items():
        _compute_and_transfers(model, stage, kinds=kinds, stages=len(stages), chunks=chunks, pairs=pairs)
        _replicas(model, kinds)
        _after_compute(model, stage, kinds=kinds, last=len(stages) - 1)
    _meetings(model, stages, pairs=pairs)
    model.order = _order(model)
    return model


def _computation(kinds: dict[str, list[Seen]]) -> list[Seen]:
    """Forward and backward computation of a stage in the order seen."""
    return sorted([*kinds[_FORWARD], *kinds[_BACKWARD]], key=lambda item: (item.start, item.op[1], item.op[0]))


def _compute_and_transfers(
    model: PipelineModel,
    stage: int,
    *,
    kinds: dict[str, list[Seen]],
    stages: int,
    chunks: int,
    pairs: dict[tuple[Op, Op], list[Op]],
) -> None:
    """Order on a stage, and what sends and receives mean for computation; fill the ends of transfers into `pairs`."""
    computation = _computation(kinds)
    model.chain(item.op for item in computation)
    for kind, step in _PEER.items():
        model.chain(item.op for item in kinds[kind])
        carried = _carried(kind, kinds)
        peer = (stage + step) % stages
        other = kind.replace("send", "recv") if kind.endswith("send") else kind.replace("recv", "send")
        count = 0
        for transfer, computed in carried:
            _tie(model, kind, transfer=transfer.op, computed=computed.op)
            if not 0 <= computed.global_chunk + step < stages * chunks:
                continue
            mine, theirs = (kind, count, stage), (other, count, peer)
            pairs[(min(mine, theirs), max(mine, theirs))].append(transfer.op)
            count += 1
    first = next((number for number, item in enumerate(computation) if item.op[0] == _BACKWARD), 0)
    if first >= 2:
        for kind in ("backward-recv", "backward-send"):
            if kinds[kind]:
                model.after[(kind, kinds[kind][0].op[1], stage)].append(computation[first - 2].op)


def _carried(kind: str, kinds: dict[str, list[Seen]]) -> list[tuple[Seen, Seen]]:
    """Each transfer of the kind with the computation whose data it carries; transfers of nothing are left out."""
    computed = kinds[_FORWARD if kind.startswith("forward") else _BACKWARD]
    by_number = sorted(computed, key=lambda item: item.op[1])
    if not computed or not kinds[kind]:
        return []
    if kind.endswith("recv"):
        newest = max(item.start for item in computed) + _TOLERANCE
        real = [item for item in kinds[kind] if item.start <= newest]
    else:
        oldest = min(item.end for item in computed) - _TOLERANCE
        real = [item for item in kinds[kind] if item.end >= oldest]
    skipped = 1 if kind.endswith("recv") and len(real) + 1 == len(by_number) else 0
    return list(zip(real, by_number[skipped:], strict=False))


def _tie(model: PipelineModel, kind: str, *, transfer: Op, computed: Op) -> None:
    """The dependency between a transfer and the computation it belongs to."""
    if kind.endswith("send"):
        model.after[transfer].append(computed)
        return
    model.after[computed].append(transfer)
    before = (computed[0], computed[1] - 1, computed[2])
    if before in model.after:
        model.after[transfer].append(before)


def _replicas(model: PipelineModel, kinds: dict[str, list[Seen]]) -> None:
    """Gathering of parameters and reduction of gradients among replicas."""
    model.chain(item.op for item in sorted([*kinds[_GATHER], *kinds[_SCATTER]], key=lambda item: item.start))
    for gathered in {item.chunk: item for item in kinds[_GATHER]}.values():
        users = [item for item in kinds[_FORWARD] if item.chunk == gathered.chunk or gathered.chunk < 0]
        if users:
            model.after[users[0].op].append(gathered.op)
    if kinds[_SEPARATE]:
        for chunk in dict.fromkeys(item.chunk for item in kinds[_SCATTER]):
            scattered = next(item for item in kinds[_SCATTER] if item.chunk == chunk)
            makers = [item for item in kinds[_BACKWARD] if item.chunk == chunk or chunk < 0]
            if makers:
                model.after[scattered.op].append(max(makers, key=lambda item: item.end).op)


def _after_compute(model: PipelineModel, stage: int, *, kinds: dict[str, list[Seen]], last: int) -> None:
    """What comes between the last computation and the end of the step."""
    newest = max(_computation(kinds), key=lambda item: item.end).op
    collected = [item.op for item in kinds[_GC]]
    model.chain(collected, [newest])
    start = collected[-1:] or [newest]
    embedding = kinds[_EMBEDDING] if stage in (0, last) else []
    tail = [item.op for item in (*kinds[_LAYERNORM], *embedding)]
    scatter = [item.op for item in kinds[_SCATTER]]
    if kinds[_SEPARATE]:
        start = [*scatter[-1:], *start]
        tail += [item.op for item in kinds[_SEPARATE]]
    else:
        tail += scatter
    tail += [item.op for item in (*kinds[_CLIP], *kinds[_OPTIMIZER])]
    model.chain(tail, start)


def _meetings(
    model: PipelineModel, stages: dict[int, dict[str, list[Seen]]], *, pairs: dict[tuple[Op, Op], list[Op]]
) -> None:
    """Which operations end together."""
    model.together = [tuple(ops) for ops in pairs.values()]
    paired = {op for ops in pairs.values() for op in ops}
    by_kind: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in model.after:
        if (op[0] in _PEER and op not in paired) or op[0] in (_GATHER, _SCATTER, _SEPARATE):
            model.together.append((op,))
        elif op[0] == _CLIP or (op[0] == _EMBEDDING and op[2] in (0, len(stages) - 1)):
            by_kind[(op[0], op[1])].append(op)
    model.together += [tuple(ops) for ops in by_kind.values()]
    model.wide = {op for op in model.after if op[0] in _WIDE}


def _order(model: PipelineModel) -> list[tuple[Op, ...]]:
    """All operations in an order in which they can happen. Raises RecordError if there is none."""
    unit_of = {op: ops for ops in model.together for op in ops}
    sorter: TopologicalSorter[tuple[Op, ...]] = TopologicalSorter()
    for op, before in model.after.items():
        unit = unit_of.get(op, (op,))
        sorter.add(unit, *(other for item in before if (other := unit_of.get(item, (item,))) != unit))
    try:
        return list(sorter.static_order())
    except CycleError:
        raise RecordError("the operations of the trace wait for each other in a circle") from None
