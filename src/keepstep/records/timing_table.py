"""Step and phase times of many ranks in columns, as a table of another tool gives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from keepstep.records.evidence import StepTiming

__all__ = ["TimingTable", "joined", "tables_of"]


@dataclass(frozen=True, slots=True, eq=False)
class TimingTable:
    """Times of one phase: entry i says that `who[i]` took `seconds[i]` for step `step[i]`."""

    phase: str
    """`step` for the whole step, else `forward`, `backward`, `compute`, `data`, `communication`, `optimizer`,
    `checkpoint`, or the tool's word."""
    who: npt.NDArray[np.int64]
    """Rank, or index in `names` where members have names."""
    step: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    names: tuple[str, ...] = ()
    """Names of the members if they are no numbers (hosts)."""
    unit_known: bool = True
    """Whether `seconds` are seconds; if not, they are only comparable with each other."""
    coordinates: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """`dp`, `tp`, `stage`, `ep` of each entry, where the table has them."""
    nodes: dict[int, str] = field(default_factory=dict)
    """The host on which each member runs, where the table says it beside the rank."""
    path: str = ""


def tables_of(timings: Iterable[StepTiming]) -> tuple[TimingTable, ...]:
    """One table for each phase, from single timings. A rank and step that come twice are both kept."""
    by_phase: dict[str, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        by_phase[timing.phase].append(timing)
    found = []
    for phase, rows in by_phase.items():
        axes = {axis for row in rows for axis in row.coordinates}
        found.append(
            TimingTable(
                phase=phase,
                who=np.array([row.rank for row in rows], dtype=np.int64),
                step=np.array([row.step for row in rows], dtype=np.int64),
                seconds=np.array([row.seconds for row in rows], dtype=np.float64),
                coordinates={
                    axis: np.array([row.coordinates.get(axis, -1) for row in rows], dtype=np.int64) for axis in axes
                },
                nodes={row.rank: row.node for row in rows if row.node is not None},
            )
        )
    return tuple(found)


def joined(parts: Sequence[TimingTable]) -> TimingTable:
    """One table of the parts of one phase, such as one file for each rank. Raises ValueError if there are none."""
    if len(parts) == 1:
        return parts[0]
    names = tuple(sorted({name for part in parts for name in part.names}))
    place = {name: number for number, name in enumerate(names)}
    renamed = [np.array([place[part.names[who]] for who in part.who]) if part.names else part.who for part in parts]
    axes = set.intersection(*(set(part.coordinates) for part in parts))
    return TimingTable(
        phase=parts[0].phase,
        who=np.concatenate(renamed),
        step=np.concatenate([part.step for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        names=names,
        unit_known=all(part.unit_known for part in parts),
        coordinates={axis: np.concatenate([part.coordinates[axis] for part in parts]) for axis in axes},
        nodes={} if names else {who: node for part in parts for who, node in part.nodes.items()},
        path=parts[0].path,
    )
