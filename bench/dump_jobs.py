"""Jobs with known faults whose Flight Recorder dumps a benchmark reads: published ones, and generated ones."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DumpJob", "jobs"]

ROOT = Path(__file__).resolve().parents[1]
PLACES = (ROOT.parent / "shared" / "data" / "flight_recorder", ROOT / "tests" / "data" / "flight_recorder")


@dataclass(frozen=True)
class DumpJob:
    """A folder of dumps `_dump_0`, `_dump_1`, ... and the ranks that may and must be named."""

    name: str
    folder: Path
    must: frozenset[int]
    may: frozenset[int]
    real: bool


def jobs(scratch: Path, ranks: int, entries: int) -> Iterator[DumpJob]:
    """The two published jobs, then generated ones of `ranks` ranks with up to `entries` operations each."""
    for name, must, may in (("gpu_error_1st", {12}, {12, 14}), ("lock_gil_1st", {9, 14}, {9, 14})):
        yield DumpJob(name, published(name, scratch), frozenset(must), frozenset(may), True)
    for name in ("absent", "mismatch", "no_dump", "healthy"):
        culprit = frozenset({ranks // 2 + 1}) if name != "healthy" else frozenset()
        folder = scratch / name
        folder.mkdir()
        for rank in range(ranks):
            if name == "no_dump" and rank in culprit:
                continue
            body = dump(rank, ranks, fault=name if rank in culprit else "", hang=name != "healthy", entries=entries)
            (folder / f"_dump_{rank}").write_bytes(pickle.dumps(body, protocol=2))
        yield DumpJob(f"generated {name}", folder, culprit, culprit, False)


def published(name: str, scratch: Path) -> Path:
    """A copy of a published job under the names that torch's analyser takes."""
    source = next(place / name for place in PLACES if place.is_dir())
    folder = scratch / name
    folder.mkdir()
    for path in source.glob("_dump_*"):
        shutil.copyfile(path, folder / path.name.removesuffix(".pickle"))
    return folder


def dump(rank: int, ranks: int, *, fault: str, hang: bool, entries: int) -> dict[str, Any]:
    """What one rank would have dumped: finished collectives of the world and of its pair, then one of all."""
    pair = (rank // 2 * 2, rank // 2 * 2 + 1)
    groups = {"0": ("default_pg", tuple(range(ranks))), str(1 + rank // 2): ("pair", pair)}
    found = []
    for number in range(1, entries):
        group = "0" if number % 4 == 0 else str(1 + rank // 2)
        sequence = number // 4 if group == "0" else number - number // 4
        found.append(entry(number, group, groups[group][0], sequence=sequence, state="completed"))
    if hang and fault != "absent":
        found.append(entry(entries, "0", "default_pg", sequence=(entries - 1) // 4 + 1, state="scheduled"))
        if fault == "mismatch":
            found[-1]["profiling_name"] = "nccl:broadcast"
    config = {name: {"name": name, "desc": desc, "ranks": json.dumps(list(of))} for name, (desc, of) in groups.items()}
    return {"version": "2.10", "nccl_version": "2.27.3", "pg_config": config, "pg_status": {}, "entries": found}


def entry(number: int, group: str, purpose: str, *, sequence: int, state: str) -> dict[str, Any]:
    """One operation in the fields of torch 2.6 and newer, with a stack of twelve frames."""
    return {
        "frames": [{"name": f"f{depth}", "filename": f"/train/layer{depth}.py", "line": depth} for depth in range(12)],
        "record_id": number,
        "pg_id": int(group),
        "process_group": (group, purpose),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[1024, 1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024, 1024]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
