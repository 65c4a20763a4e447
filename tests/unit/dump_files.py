"""Flight Recorder dumps in the field names of several torch versions, for tests."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def entry(number, group="0", *, seq, state="scheduled", op="nccl:all_reduce", p2p=False, **rest):
    """An entry as torch 2.6 and newer write it."""
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 12}],
        "record_id": number,
        "pg_id": int(group) if group.isdigit() else 0,
        "process_group": (group, "default_pg"),
        "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 5 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": p2p,
        **rest,
    }


def dump(entries, ranks, version="2.10", **rest):
    return {
        "version": version,
        "nccl_version": "2.27.3",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(ranks))}},
        "pg_status": {},
        "entries": entries,
        **rest,
    }


def of_2_3(entries):
    """The same as torch 2.3 wrote it: only `seq_id`, no group name, no `pg_config`."""
    old = []
    for item in entries:
        kept = {key: item[key] for key in ("pg_id", "profiling_name", "state", "input_sizes", "output_sizes", "frames")}
        kept |= {"seq_id": item["collective_seq_id"], "time_created_us": item["time_created_ns"] // 1000}
        old.append(kept)
    return {"version": "1.5", "entries": old}


def write(folder, dumps, *, as_json=False, name="nccl_trace_rank_{}"):
    folder.mkdir(exist_ok=True)
    for rank, content in dumps.items():
        path = folder / name.format(rank)
        if as_json:
            path.with_suffix(".json").write_text(json.dumps(content))
        else:
            path.write_bytes(pickle.dumps(content, protocol=2))
    return folder
