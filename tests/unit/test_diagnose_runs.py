"""Run directories of keepstep as input of `keepstep diagnose`: journal, incidents, rings, logs of members."""

from __future__ import annotations

import pytest
from diagnosed_text import named, ranks
from ring_writer import RingWriter

from keepstep.records.finding import Finding, Suspect
from keepstep.records.incident import Incident
from keepstep.records.journal_line import encode_line
from keepstep.records.lifecycle import JobEnded, JobStarted
from keepstep.service.diagnosing import diagnose_paths

STARTED = JobStarted(job="gpt", script="train.py", world=4)
ENDED = JobEnded(job="gpt", exit_code=0, why="all members ended")
LOSS = Incident(job="gpt", kind="crash", number=1, rank=2, node="n1", detected=0.1, first_valid_step=1.5)
SLOW = Finding(
    job="gpt", kind="compute_slow", number=3, suspects=((Suspect(rank=1),),), confidence=0.7, evidence=("late",)
)


def run_of(folder, *events):
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_bytes(b"".join(encode_line(event) for event in events))
    return folder


def test_incidents_and_findings_of_the_journal(tmp_path):
    answer = diagnose_paths([run_of(tmp_path / "run", STARTED, SLOW, LOSS, ENDED)])
    assert {(finding.kind, *ranks([finding])) for finding in answer.findings} == {("crash", 2), ("compute_slow", 1)}
    assert {finding.job for finding in answer.findings} == {"gpt"}
    assert any("1.500 s after the onset" in line for finding in answer.findings for line in finding.evidence)


def test_a_run_that_ended_well_is_healthy(tmp_path):
    answer = diagnose_paths([run_of(tmp_path / "run", STARTED, ENDED)])
    assert [finding.kind for finding in answer.findings] == ["healthy"]
    assert answer.exit_code == 0


def test_a_run_that_was_cut_off_is_told_with_its_members_logs(tmp_path):
    run = run_of(tmp_path / "run", STARTED)
    (run / "logs").mkdir()
    (run / "logs" / "rank3.log").write_text("Traceback (most recent call last):\nKeyError: 'y'\n")
    answer = diagnose_paths([run])
    assert [(finding.kind, finding.layer) for finding in answer.findings] == [("crash", "application")]
    assert named(answer.findings) == [[{"rank": 3}]]


def test_a_torn_journal_gives_what_it_has(tmp_path):
    run = run_of(tmp_path / "run", STARTED, LOSS)
    with open(run / "journal.jsonl", "ab") as file:
        file.write(b'{"record":"JobEn')
    assert ranks(diagnose_paths([run]).findings) == {2}


def test_a_damaged_journal_is_named(tmp_path):
    run = run_of(tmp_path / "run", STARTED)
    (run / "journal.jsonl").write_bytes(b"not a record\n" + encode_line(STARTED))
    (run / "logs").mkdir()
    (run / "logs" / "rank0.log").write_text("step 1 loss 2.0\n")
    answer = diagnose_paths([run])
    assert [item.path for item in answer.unread] == [str(run)]


def test_rings_of_an_incident_show_who_is_behind(tmp_path):
    for rank in range(4):
        ring = RingWriter(64, rank=rank)
        count = 6 if rank == 1 else 7
        ring.put_group(0, b"world", group_hash=9, counts=(count, count, 6))
        (tmp_path / f"n1-{rank}.ring").write_bytes(bytes(ring.buffer))
    findings = diagnose_paths([tmp_path]).findings
    assert ranks(findings) == {1}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"KSRING" + b"\xff" * 9000])
def test_a_ring_that_is_none_is_named(content, tmp_path):
    (tmp_path / "a.ring").write_bytes(content)
    (tmp_path / "job.log").write_text("step 1 loss 2.0\n")
    answer = diagnose_paths([tmp_path])
    assert [item.path for item in answer.unread] == [str(tmp_path / "a.ring")]
