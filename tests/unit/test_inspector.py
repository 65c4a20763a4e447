"""NCCL Inspector output: the late rank spends least time in a collective."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from reading_all import evidence_of, findings_of, suspects_of, unread_of

from keepstep.records.evidence import CollectiveRecord


def line(rank, number, microseconds, *, group="0xa", size=4, op="AllReduce", process=None):
    return {
        "header": {"id": group, "rank": rank, "n_ranks": size, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": 1_748_030_377_748_202 + number,
            "hostname": f"h{(rank if process is None else process) // 2}",
            "pid": 100 + (rank if process is None else process),
        },
        "coll_perf": {
            "coll": op,
            "coll_sn": number,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": microseconds,
            "coll_algobw_gbs": 1.0,
            "coll_busbw_gbs": 1.5,
        },
    }


def write(folder, late=None, numbers=40, behind=None):
    rng = np.random.default_rng(1)
    for rank in range(4):
        last = numbers - 9 if rank == behind else numbers
        rows = [line(rank, n, int((300 if rank == late else 900) * rng.normal(1, 0.02))) for n in range(last)]
        (folder / f"h-pid{rank}.log").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return folder


def test_who_waits_least_is_late(tmp_path):
    findings = findings_of(write(tmp_path, late=2))
    assert [finding.kind for finding in findings] == ["compute_slow"]
    assert suspects_of(findings) == [[[{"rank": 2}]]]


def test_one_file_of_all_processes(tmp_path):
    parts = [path.read_text() for path in sorted(write(tmp_path, late=2).iterdir())]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "all.jsonl").write_text("".join(parts))
    findings = findings_of(tmp_path / "whole")
    assert suspects_of(findings) == [[[{"rank": 2}]]] and findings[0].victims == (0, 1, 3)


@pytest.mark.parametrize("key", ["coll_exec_time_us", "dump_timestamp_us"])
def test_times_that_no_clock_has(key, tmp_path):
    row = line(0, 3, 900)
    next(part for part in row.values() if key in part)[key] = 10**400
    (tmp_path / "one.log").write_text("\n".join(map(json.dumps, [line(0, 1, 900), row])))
    assert all(finding.kind in ("healthy", "undetermined") for finding in findings_of(tmp_path))


def test_equal_times_are_healthy(tmp_path):
    assert [finding.kind for finding in findings_of(write(tmp_path))] == ["healthy"]


def test_a_rank_that_recorded_less_is_behind(tmp_path):
    findings = findings_of(write(tmp_path, behind=1))
    assert suspects_of(findings) == [[[{"rank": 1}]]]


def test_a_communicator_that_is_slower_than_its_like(tmp_path):
    for group in range(4):
        for place in range(2):
            rank = 2 * group + place
            rows = [line(rank, 0, 500, group="0xworld", size=8)]
            took = 3000 if group == 3 else 1000
            rows += [line(place, n, took, group=f"0x{group}", size=2, process=rank) for n in range(20)]
            (tmp_path / f"h-pid{rank}.log").write_text("\n".join(json.dumps(row) for row in rows))
    (finding,) = findings_of(tmp_path)
    assert (finding.kind, suspects_of([finding])) == ("communication_slow", [[[{"rank": 6}, {"rank": 7}]]])


def test_objects_over_several_lines_torn_lines_and_gzip(tmp_path):
    rows = [line(0, n, 900) for n in range(10)]
    (tmp_path / "one.json").write_text("\n".join(json.dumps(row, indent=2) for row in rows))
    (tmp_path / "two.log.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())[:-20])
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "three.log").write_text(text[:-30])
    counts = {}
    for item in evidence_of(tmp_path):
        if isinstance(item, CollectiveRecord):
            counts[item.path.rsplit("/", 1)[-1]] = counts.get(item.path.rsplit("/", 1)[-1], 0) + 1
    assert counts["one.json"] == 10
    assert counts["three.log"] == 9
    assert {item.path.rsplit("/", 1)[-1] for item in unread_of(tmp_path)} >= {"three.log", "two.log.gz"}


def test_members_of_a_communicator_are_kept_once(tmp_path):
    (tmp_path / "one.log").write_text("\n".join(json.dumps(line(0, n, 900)) for n in range(10)))
    records = [item for item in evidence_of(tmp_path) if isinstance(item, CollectiveRecord)]
    assert len({id(record.ranks) for record in records}) == 1


@pytest.mark.parametrize("wrong", [{"rank": 2**70}, {"rank": -1}, {"n": 2**70}])
def test_numbers_that_no_job_has(wrong, tmp_path):
    rows = [line(0, n, 900) for n in range(10)] + [line(wrong.get("rank", 0), wrong.get("n", 3), 900)]
    (tmp_path / "one.log").write_text("\n".join(map(json.dumps, rows)))
    assert all(finding.kind in ("healthy", "undetermined") for finding in findings_of(tmp_path))


@pytest.mark.parametrize(("size", "kind"), [(4, "undetermined"), (None, "undetermined"), (1, "healthy")])
def test_one_rank_of_several_is_compared_with_nobody(size, kind, tmp_path):
    (tmp_path / "h-pid2.log").write_text("\n".join(json.dumps(line(0, n, 900, size=size)) for n in range(40)))
    (finding,) = findings_of(tmp_path)
    assert (finding.kind, finding.suspects) == (kind, ())
    assert kind == "healthy" or ("only rank 0" in finding.evidence[0] and "other ranks" in finding.next_probe)
