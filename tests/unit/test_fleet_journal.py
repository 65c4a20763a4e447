"""Runs of keepstep in a fleet: one call answers what waited, who had finished, which path, who was excluded."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fleet_data import asked, fleet_of, written
from ring_writer import RingWriter

from keepstep.cli import main
from keepstep.records.events import FactRecord, Finding, Incident, JobEnded, JobStarted, StepProgress, Suspect
from keepstep.records.journal_line import encode_line
from keepstep.records.messages import FirstStep, MemberStarted
from keepstep.records.ring import OpSlot, PeerSlot, SlotStatus
from keepstep.service.fleet_query import incident_answer

WALL = 1_790_000_000.0


def journal() -> bytes:
    job = {"job": "run-7"}
    finding = Finding(
        **job,
        wall=WALL + 20.5,
        kind="crash",
        rank=2,
        layer="hardware_gpu",
        suspects=((Suspect(rank=2),),),
        evidence=("signal 9",),
    )
    records = [
        JobStarted(**job, wall=WALL, script="train.py", world=4, standbys=1),
        FactRecord(**job, wall=WALL + 1, fact=MemberStarted("m0", 0, "n1", 11)),
        StepProgress(**job, wall=WALL + 10, step=12, step_s=0.5, members=4, standbys=1),
        finding,
        Incident(
            **job,
            wall=WALL + 21,
            kind="crash",
            number=1,
            attempt=0,
            generation=1,
            rank=2,
            node="n1",
            member="m2",
            step=30,
            onset_wall=WALL + 20,
            detected=0.04,
            first_valid_step=0.42,
            members_changed=1,
            bytes_moved=5,
        ),
        FactRecord(**job, wall=WALL + 22, fact=FirstStep(1, 31)),
        JobEnded(**job, wall=WALL + 60, exit_code=0, steps_kept=60),
    ]
    return b"".join(encode_line(record) for record in records)


def ring(rank: int, *slots: OpSlot) -> bytes:
    writer = RingWriter(64, rank=rank, member=f"m{rank}".encode(), offset_ns=int(WALL * 1e9))
    writer.put_group(0, b"world", group_hash=7, counts=(65, 65, 65))
    for slot in slots:
        writer.put(slot)
    return bytes(writer.buffer)


def op(sequence: int, status: SlotStatus, *, started: int, peers=()) -> OpSlot:
    return OpSlot(
        0, 1, 1, 1, 0, status, 7, 0, sequence, sequence // 2, 1, 4, started, started, started + 5, 0, 0, peers
    )


def dry(peer: int, waited_ns: int, received: int = 0) -> PeerSlot:
    return PeerSlot(0, 0, peer, 0, 0, received, 0, 0, 0, waited_ns)


def run_directory(folder: Path) -> Path:
    rings = folder / "run" / "incidents" / "1"
    rings.mkdir(parents=True)
    (folder / "run" / "journal.jsonl").write_bytes(journal())
    done, cut = SlotStatus.DONE, SlotStatus.ABORTED
    (rings / "m0.ring").write_bytes(
        ring(0, op(63, done, started=10), op(64, cut, started=20, peers=(dry(1, 0), dry(3, 9, 8))))
    )
    (rings / "m2.ring").write_bytes(ring(2, op(62, done, started=5), op(63, done, started=11)))
    (rings / "m3.ring").write_bytes(
        ring(3, op(63, done, started=12), op(64, cut, started=18, peers=(dry(2, 99), dry(0, 0))))
    )
    (rings / "torn.ring").write_bytes(b"no ring")
    return folder / "run"


def test_one_call_answers_the_five_questions(tmp_path, capsys):
    fleet_of(tmp_path / "fleet", run_directory(tmp_path))
    story = incident_answer(tmp_path / "fleet", "run-7:1")
    assert (story.operation, story.group, story.sequence, story.waiting) == ("all_reduce", "world", 64, "0,3")
    assert story.finished == "2 (the one before; never came to this one)"
    assert (story.path, story.rank, story.node) == ("2->3", 2, "n1")
    assert (story.excluded, story.next_step) == ("m2 (rank 2)", 30)
    assert story.evidence == ("rank 2 had finished sequence 63", "signal 9")
    assert story.phases_us == {"detected": 40_000, "first_valid": 420_000}
    assert main(["fleet", "query", str(tmp_path / "fleet"), "--incident", "run-7:1"]) == 0
    assert "which operation waited  all_reduce, group world, sequence 64" in capsys.readouterr().out


def test_a_run_is_an_attempt_with_its_progress(tmp_path):
    store = fleet_of(tmp_path / "fleet", run_directory(tmp_path))
    assert asked(store, "SELECT state, gpus, nodes FROM attempts") == [("COMPLETED", 5, "n1")]
    assert asked(store, "SELECT what, step FROM progress ORDER BY time") == [
        ("started", None),
        ("step", 12),
        ("ended", 60),
    ]


def test_a_run_inside_a_job_of_the_scheduler_is_not_counted_twice(tmp_path):
    head = "JobID|State|Start|End|NodeList|Partition"
    sacct = written(tmp_path, "sacct.txt", f"{head}\n12|COMPLETED|{int(WALL) - 30}|{int(WALL) + 90}|n[1-2]|train\n")
    store = fleet_of(tmp_path / "fleet", sacct, run_directory(tmp_path))
    assert asked(store, "SELECT job_id FROM attempts") == [("12",)]
    assert asked(
        store, "SELECT DISTINCT scheduler_job FROM incidents UNION SELECT DISTINCT scheduler_job FROM progress"
    ) == [("12",)]


def test_a_torn_journal_gives_what_is_whole(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(journal()[:-20])
    store = fleet_of(tmp_path / "fleet", folder)
    assert (store.rows("incidents"), store.rows("kept_aside")) == (1, 1)
    assert asked(store, "SELECT state, time_note FROM attempts") == [
        ("FAILED", "the journal has no end: the last record is taken for it")
    ]


def test_the_command_line(tmp_path, capsys):
    fleet = str(tmp_path / "fleet")
    good = written(tmp_path, "a.txt", "JobID|State|Start|End\n1|COMPLETED|1790000000|1790000060\n")
    bad = written(tmp_path, "b.txt", "hello\n")
    assert main(["fleet", "import", str(good), str(bad), "--into", fleet, "--format", "json"]) == 0
    summary = msgspec.json.decode(capsys.readouterr().out)
    assert [bool(source["failed"]) for source in summary["sources"]] == [False, True]
    assert main(["fleet", "import", str(bad), "--into", fleet]) == 65
    assert main(["fleet", "query", fleet, "SELECT count(*) AS n FROM attempts", "--format", "csv"]) == 0
    assert capsys.readouterr().out.endswith("n\n1\n")
    assert main(["fleet", "taxonomy", fleet]) == 0
    for wrong in (
        ["fleet", "query", fleet],
        ["fleet", "query", fleet, "DROP TABLE attempts"],
        ["fleet", "query", str(tmp_path), "SELECT 1"],
        ["fleet", "import", str(tmp_path / "none"), "--into", fleet],
        ["fleet", "import", str(good), "--into", fleet, "--timezone", "Mars/Olympus"],
        ["fleet", "import", str(good), "--into", fleet, "--at", "yesterday"],
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") <= 2
