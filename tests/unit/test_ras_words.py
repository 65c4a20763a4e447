"""NCCL RAS reports in text: everything that NCCL may say of a rank, and what it says without naming one."""

from __future__ import annotations

import pytest
from reading_all import findings_of, suspects_of

HEAD = """Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}

Errors
======

"""


def place(rank):
    return f"GPU {rank % 8} managed by process {100 + rank} on node n{rank // 8}"


def found(folder, errors, text):
    (folder / "ras.txt").write_text(HEAD.format(errors=errors) + text)
    findings = findings_of(folder)
    return [(finding.kind, *suspects) for finding, suspects in zip(findings, suspects_of(findings), strict=True)]


def test_a_rank_that_reports_an_error_has_failed(tmp_path):
    text = f"#0-0 (a1) ERROR\n  Asynchronous error on 1 rank\n  Rank 3 reported Unhandled CUDA error -- {place(3)}\n"
    assert found(tmp_path, "ERROR", text) == [("crash", [{"rank": 3}])]


def test_ranks_with_remote_errors_are_victims(tmp_path):
    text = "#0-0 (a1) ERROR\n  Asynchronous errors on 3 ranks\n  2 ranks reported Remote process error\n"
    text += f"  Rank 0 -- {place(0)}\n  Rank 1 -- {place(1)}\n  Rank 9 reported System error -- {place(9)}\n"
    assert found(tmp_path, "ERROR", text) == [("crash", [{"rank": 9}])]


def test_remote_errors_alone_name_nobody(tmp_path):
    text = "#0-0 (a1) ERROR\n  Asynchronous errors on 2 ranks\n  2 ranks reported Remote process error\n"
    text += f"  Rank 0 -- {place(0)}\n  Rank 1 -- {place(1)}\n"
    assert found(tmp_path, "ERROR", text) == [("undetermined",)]
    assert findings_of(tmp_path)[0].victims == (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        f"  31 ranks have status RUNNING\n  Rank 7 has status INIT -- {place(7)}\n",
        "  30 ranks have status RUNNING\n  2 ranks have status ABORT\n"
        f"  Rank 7 -- {place(7)}\n  Rank 8 -- {place(8)}\n",
    ],
)
def test_another_status_is_not_silence(text, tmp_path):
    text = "Warnings\n========\n\n#0-0 (a1) MISMATCH\n  Communicator ranks have different status\n" + text
    assert found(tmp_path, "MISMATCH", text) == [("undetermined",)]
    (finding,) = findings_of(tmp_path)
    assert any("rank 7 has status" in line for line in finding.evidence)
    assert "ncclras -v" in finding.next_probe


def counts(kind, *groups):
    text = f"  Communicator ranks have different {kind} operation counts\n"
    for operation, ranks, named in groups:
        if len(ranks) == 1:
            text += f"  Rank {ranks[0]} has launched up to operation {operation} -- {place(ranks[0])}\n"
            continue
        text += f"  {len(ranks)} ranks have launched up to operation {operation}\n"
        text += "".join(f"  Rank {rank} -- {place(rank)}\n" for rank in ranks if named)
    return text + "\n"


def test_two_kinds_of_collectives_are_counted_apart(tmp_path):
    others = [rank for rank in range(32) if rank != 7]
    text = "#0-0 (a1) MISMATCH\n" + counts("AllReduce", (64, others, False), (60, [7], True))
    text += counts("ReduceScatter", (900, others, False), (880, [7], True))
    assert found(tmp_path, "MISMATCH", text) == [("noncommunication_hang", [{"rank": 7}])]


def test_what_is_said_of_statuses_and_counts_is_kept_apart(tmp_path):
    others = [rank for rank in range(32) if rank not in (7, 8)]
    text = "#0-0 (a1) MISMATCH\n  Communicator ranks have different status\n  30 ranks have status RUNNING\n"
    text += f"  2 ranks have status ABORT\n  Rank 7 -- {place(7)}\n  Rank 8 -- {place(8)}\n"
    text += counts("AllReduce", (64, others, False), (60, [7, 8], True))
    assert found(tmp_path, "MISMATCH", text) == [
        ("noncommunication_hang", [{"rank": 7}]),
        ("noncommunication_hang", [{"rank": 8}]),
    ]


def test_halves_that_are_not_named_are_no_verdict(tmp_path):
    text = "#0-0 (a1) MISMATCH\n" + counts("AllReduce", (64, range(16), False), (60, range(16, 32), False))
    assert found(tmp_path, "MISMATCH", text) == [("undetermined",)]
    (finding,) = findings_of(tmp_path)
    assert any("16 up to 60" in line for line in finding.evidence)


def test_halves_one_operation_apart_may_be_running(tmp_path):
    text = "#0-0 (a1) MISMATCH\n" + counts("AllReduce", (64, range(16), False), (63, range(16, 32), False))
    assert found(tmp_path, "MISMATCH", text) == [("healthy",)]


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (
            "INCOMPLETE",
            "INCOMPLETE\n  Missing communicator data from 12 job processes\n\n"
            "#0-0 (a1) INCOMPLETE\n  Missing communicator data from 12 ranks\n",
        ),
        ("INCOMPLETE", "#0-0 (a1) INCOMPLETE\n  Missing communicator data from 12 ranks\n"),
        ("INCOMPLETE", "DEAD\n  12 job processes are considered dead (unreachable via the RAS network)\n"),
        ("ERROR", "#0-0 (a1) ERROR\n  Asynchronous errors on 12 ranks\n  12 ranks reported System error\n"),
        ("MISMATCH", ""),
    ],
)
def test_trouble_without_names_is_not_healthy(errors, text, tmp_path):
    assert found(tmp_path, errors, text) == [("undetermined",)]


def test_a_device_with_two_numbers(tmp_path):
    text = "#0-0 (a1) ERROR\n  Initialization error on 1 rank\n"
    text += "  Rank 3 reported System error -- GPU 0 (NVML 3) managed by process 103 on node n0\n"
    assert found(tmp_path, "ERROR", text) == [("crash", [{"rank": 3}])]
    assert any("node n0, GPU 0, process 103" in line for line in findings_of(tmp_path)[0].evidence)


def test_lines_of_the_job_behind_a_report_are_none_of_it(tmp_path):
    others = [rank for rank in range(32) if rank != 7]
    text = "#0-0 (a1) MISMATCH\n" + counts("AllReduce", (64, others, False), (60, [7], True))
    text += "Rank 5 loss 2.1\nRank 6 reported for step 9 in 3 s\n"
    assert found(tmp_path, "MISMATCH", text) == [("noncommunication_hang", [{"rank": 7}])]
