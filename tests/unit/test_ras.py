"""NCCL RAS reports: text and JSON, whole and damaged."""

from __future__ import annotations

import json

import pytest
from dump_files import DATA
from reading_all import evidence_of, findings_of, suspects_of

from keepstep.records.evidence import GroupProgress, Place

RAS = DATA / "ras"
TABLE = """Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
"""


def only(path):
    (finding,) = findings_of(path)
    return finding.kind, suspects_of([finding])[0]


def test_the_four_reports():
    assert only(RAS / "ncclexample-healthy.txt") == ("healthy", [])
    assert only(RAS / "ncclexample-exit-dead-rank7.txt") == ("crash", [[{"node": "node1", "device": "3"}]])
    assert only(RAS / "ncclexample-exit-incomplete-rank7.txt") == ("reporter_silent", [[{"rank": 7}]])
    assert only(RAS / "ncclexample-sleep-straggler-rank7.txt") == ("noncommunication_hang", [[{"rank": 7}]])


def test_reports_of_one_job_lead_from_the_process_to_its_rank(tmp_path):
    for name in ("dead", "incomplete"):
        (tmp_path / name).write_text((RAS / f"ncclexample-exit-{name}-rank7.txt").read_text())
    assert only(tmp_path) == ("crash", [[{"rank": 7}]])


def test_one_operation_behind_in_a_running_job_is_healthy(tmp_path):
    lines = "\n".join(f"    Rank {rank} -- GPU {rank} managed by process {48 + rank} on node n1" for rank in range(6))
    text = f"{TABLE}    26 ranks have launched up to operation 6650\n"
    text += f"    6 ranks have launched up to operation 6649\n{lines}\n"
    (tmp_path / "ras.txt").write_text(text)
    assert only(tmp_path)[0] == "healthy"
    (tmp_path / "ras.txt").write_text(text * 2)  # the same counts asked twice: they stand still
    found = findings_of(tmp_path)
    assert {one["rank"] for finding in suspects_of(found) for some in finding for one in some} == set(range(6))


def test_a_rank_that_has_launched_nothing(tmp_path):
    text = TABLE + "  31 ranks have launched up to operation 9\n"
    text += "  Rank 3 has not launched any operations -- GPU 3 managed by process 5 on node b\n"
    (tmp_path / "ras.txt").write_text(text)
    assert only(tmp_path) == ("noncommunication_hang", [[{"rank": 3}]])


def test_colours_line_ends_and_noise_around_a_report(tmp_path):
    text = (RAS / "ncclexample-sleep-straggler-rank7.txt").read_text()
    noisy = "OK\r\n" + "\r\n".join(f"\x1b[31m{line}\x1b[0m" for line in text.splitlines()) + "\r\nepoch 3 loss 2.1\r\n"
    (tmp_path / "ras.txt").write_bytes(noisy.encode() + b"\xff\xfe\n")
    assert only(tmp_path) == ("noncommunication_hang", [[{"rank": 7}]])


def test_the_missing_rank_in_words(tmp_path):
    text = TABLE.replace("MISMATCH", "INCOMPLETE").split("Errors\n======")[0]
    text += "Errors\n======\n\nINCOMPLETE\n  Missing communicator data from 1 job process\n"
    text += "  Process 3487984 on node 172.16.64.213 managing GPU 5\n\n"
    text += "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 21\n"
    (tmp_path / "ras.txt").write_text(text)
    assert only(tmp_path) == ("reporter_silent", [[{"rank": 21}]])


def test_monitor_mode(tmp_path):
    (tmp_path / "watch.txt").write_text(
        "RAS Monitor Mode - watching for peer changes (Ctrl+C to exit)...\n"
        "[2025-12-19 13:07:07] PEER_DEAD: Process 1524345 on node 172.16.64.245 managing GPU 1\n"
    )
    assert only(tmp_path) == ("crash", [[{"node": "172.16.64.245", "device": "1"}]])


def member(rank, pid, count, **rest):
    return {
        "rank": rank,
        "host": "10.0.0.1",
        "pid": pid,
        "cuda_dev": pid % 8,
        "nvml_dev": pid % 8,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "abort_flag": False},
        "collective_counts": {"Broadcast": 0, "AllReduce": count},
        **rest,
    }


def report(*communicators):
    return {
        "nccl_version": "2.29.1",
        "communicators_count": len(communicators),
        "communicators": [
            {
                "hash": name,
                "size": len(ranks) + len(missing),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(missing),
                "ranks": ranks,
                "missing_ranks": missing,
            }
            for name, ranks, missing in communicators
        ],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }


def gone(rank, pid, dead=False):
    return {
        "rank": rank,
        "host": "10.0.0.1",
        "pid": pid,
        "cuda_dev": 1,
        "nvml_dev": 1,
        "status": {"unresponsive": True, "considered_dead": dead},
    }


def write(path, value, prefix=""):
    path.mkdir(exist_ok=True)
    (path / "ras.json").write_text(prefix + json.dumps(value, indent=2))
    return path


def test_json_of_a_healthy_job(tmp_path):
    value = report(("0xa", [member(rank, 100 + rank, 7) for rank in range(4)], []))
    assert only(write(tmp_path, value, prefix="OK\n"))[0] == "healthy"


@pytest.mark.parametrize(("dead", "kind"), [(False, "reporter_silent"), (True, "crash")])
def test_json_of_a_missing_rank(tmp_path, dead, kind):
    value = report(("0xa", [member(0, 100, 4)], [gone(1, 101, dead)]))
    assert only(write(tmp_path, value)) == (kind, [[{"rank": 1}]])


def test_the_json_of_2_28_9_lacks_a_comma(tmp_path):
    value = json.dumps(report(("0xa", [member(0, 100, 4)], [gone(1, 101)])), indent=2)
    broken = value.replace(
        '"nvml_dev": 1,\n          "status": {\n            "unresponsive"',
        '"nvml_dev": 1\n          "status": {\n            "unresponsive"',
    )
    assert broken != value
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    (tmp_path / "ras.json").write_text("OK\n" + broken)
    assert only(tmp_path) == ("reporter_silent", [[{"rank": 1}]])


def test_ranks_of_small_communicators_are_brought_to_the_world(tmp_path):
    world = ("0xw", [member(rank, 100 + rank, 1) for rank in range(4)], [])
    one = ("0x1", [member(0, 100, 10), member(1, 101, 10)], [])
    two = ("0x2", [member(0, 102, 10), member(1, 103, 3)], [])
    folder = write(tmp_path, report(one, two, world))
    assert only(folder) == ("noncommunication_hang", [[{"rank": 3}]])
    assert {item.rank for item in evidence_of(folder) if isinstance(item, Place)} == {0, 1, 2, 3}
    assert {item.ranks for item in evidence_of(folder) if isinstance(item, GroupProgress)} == {
        (0, 1),
        (2, 3),
        (0, 1, 2, 3),
    }


def test_who_waits_in_another_communicator_is_a_victim(tmp_path):
    """Rank 1 lags in 0x2 because it waits for rank 0 in 0x1; only rank 0 is to blame."""
    world = ("0xw", [member(rank, 100 + rank, 1) for rank in range(4)], [])
    one = ("0x1", [member(0, 100, 3), member(1, 101, 10)], [])
    two = ("0x2", [member(0, 101, 3), member(1, 102, 10)], [])
    assert only(write(tmp_path, report(one, two, world))) == ("noncommunication_hang", [[{"rank": 0}]])


def test_a_rank_that_answers_without_its_communicator_is_not_silent(tmp_path):
    left = gone(1, 101) | {"status": {"unresponsive": False, "considered_dead": False}}
    assert only(write(tmp_path, report(("0xa", [member(0, 100, 4), member(2, 102, 4)], [left])))) == (
        "undetermined",
        [],
    )


def test_an_error_of_a_rank_and_the_remote_errors_it_causes(tmp_path):
    ranks = [member(rank, 100 + rank, 7) for rank in range(4)]
    for rank, code in ((0, 6), (2, 2), (3, 6)):
        ranks[rank]["status"]["async_error"] = code
    assert only(write(tmp_path, report(("0xa", ranks, [])))) == ("crash", [[{"rank": 2}]])


@pytest.mark.parametrize(
    "text",
    [
        '{"communicators": 5, "communicators_count": 1}',
        '{"communicators": [1, null, {"ranks": [null, {"rank": "x"}], "missing_ranks": {}}]}',
        '{"communicators": [',
        "Communicators... (0.00s)\n",
        "OK\n",
    ],
)
def test_damage_is_no_traceback(text, tmp_path):
    (tmp_path / "ras").write_text(text)
    assert all(finding.kind in ("healthy", "undetermined") for finding in findings_of(tmp_path))
