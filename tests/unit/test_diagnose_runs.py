"""Run directories of keepstep as input of `keepstep diagnose`: journal, incidents, rings, logs of members."""

from __future__ import annotations

import pickle
import zlib

import msgspec
import pytest
from diagnosed_text import named, ranks
from dump_files import dump, entry
from ring_writer import RingWriter

from keepstep.records.finding import Finding, Suspect
from keepstep.records.incident import Incident
from keepstep.records.journal_line import encode_line
from keepstep.records.lifecycle import JobEnded, JobStarted
from keepstep.records.watch_messages import EvidenceGiven
from keepstep.service.bundles import Bundles, Retention
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


def test_a_finding_that_had_passed_says_so(tmp_path):
    past = msgspec.structs.replace(SLOW, status="ended")
    (found,) = diagnose_paths([run_of(tmp_path / "run", STARTED, SLOW, past, ENDED)]).findings
    assert found.evidence == ("late", "ended: it had passed before the run ended")


def test_what_a_probe_left_of_a_finding_stands_in_its_place(tmp_path):
    left = msgspec.structs.replace(SLOW, number=4, layer="host_cpu", confidence=0.9, evidence=("measured",), refers=3)
    quiet = Finding(job="gpt", kind="undetermined", number=5, evidence=("nothing is slow now",), refers=4)
    (found,) = diagnose_paths([run_of(tmp_path / "run", STARTED, SLOW, left, quiet, ENDED)]).findings
    assert (found.layer, found.confidence) == ("host_cpu", 0.9)
    assert found.evidence[:3] == ("late", "measured", "nothing is slow now")


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


NOTE = Finding(
    job="gpt", kind="healthy", number=1, confidence=0.0, evidence=("the baseline of run x is not used: another world",)
)


@pytest.mark.parametrize(
    ("rest", "kind", "says"),
    [
        ((), "undetermined", "cut off"),
        ((JobEnded(job="gpt", exit_code=1, why="rank 0 ended with 1"),), "undetermined", "ended with 1"),
        ((ENDED,), "healthy", "ended well"),
    ],
)
def test_a_note_about_the_baseline_says_nothing_of_the_end(rest, kind, says, tmp_path):
    answer = diagnose_paths([run_of(tmp_path / "run", STARTED, NOTE, *rest)])
    (finding,) = answer.findings
    assert finding.kind == kind and says in finding.evidence[0]
    assert NOTE.evidence[0] in finding.evidence


KILLED = Finding(
    job="gpt", kind="crash", number=4, suspects=((Suspect(rank=2),),), confidence=0.95, evidence=("SIGKILL",)
)


def put_rings(folder, counts, *, generation=5):
    folder.mkdir(parents=True)
    for rank, (queued, finished) in enumerate(counts):
        ring = RingWriter(64, rank=rank, generation=generation)
        ring.put_group(0, b"world", group_hash=9, counts=(queued, queued, finished))
        (folder / f"n1-{rank}.ring").write_bytes(bytes(ring.buffer))


def test_one_kill_is_one_fault(tmp_path):
    """The journal has it as a finding and as an incident, and the rings show who did not come."""
    run = run_of(tmp_path / "run", STARTED, KILLED, LOSS, ENDED)
    put_rings(run / "incidents" / "1", [(7, 6), (7, 6), (6, 6), (7, 6)])
    (finding,) = diagnose_paths([run]).findings
    assert (finding.kind, named([finding])) == ("crash", [[{"rank": 2, "node": "n1"}]])
    assert "SIGKILL" in finding.evidence and any("incident 1" in line for line in finding.evidence)


def test_rings_of_two_moments_are_not_compared(tmp_path):
    """Counters begin anew after a change of the membership."""
    run = run_of(tmp_path / "run", STARTED, ENDED)
    put_rings(run / "incidents" / "1", [(70, 70), (70, 70), (70, 70), (70, 70)])
    put_rings(run / "incidents" / "2", [(7, 6), (6, 6), (7, 6), (7, 6)], generation=6)
    put_rings(run / "findings" / "3", [(9, 9), (9, 9), (9, 9), (9, 9)], generation=6)
    answer = diagnose_paths([run])
    assert ranks(answer.findings) == {1}
    assert not any("several dumps" in line for finding in answer.findings for line in finding.evidence)


def test_dumps_in_bundles_are_those_of_their_ranks(tmp_path):
    """Names of processes count all processes of a node, standbys too."""
    run = run_of(tmp_path / "run", STARTED)
    bundles = Bundles(run, Retention(9, 1 << 30))
    for rank, member in ((0, "m1"), (1, "m0"), (2, "m5"), (3, "m3")):
        entries = [entry(seq, seq=seq, state="completed") for seq in range(1, 5)]
        entries += [] if rank == 2 else [entry(9, seq=5)]
        packed = zlib.compress(pickle.dumps(dump(entries, range(4)), protocol=2))
        bundles.put_evidence("n1", EvidenceGiven(1, member, rank, dump=packed))
    bundles.close()
    answer = diagnose_paths([run])
    assert ranks(answer.findings) == {2}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"KSRING" + b"\xff" * 9000])
def test_a_ring_that_is_none_is_named(content, tmp_path):
    (tmp_path / "a.ring").write_bytes(content)
    (tmp_path / "job.log").write_text("step 1 loss 2.0\n")
    answer = diagnose_paths([tmp_path])
    assert [item.path for item in answer.unread] == [str(tmp_path / "a.ring")]


@pytest.mark.parametrize("kind", ["compute_slow", "communication_slow", "imbalance", "healthy"])
def test_rings_of_a_job_that_makes_steps_show_no_hang(kind, tmp_path):
    """They were taken from ranks on their way, so that some are ahead."""
    found = msgspec.structs.replace(SLOW, kind=kind)
    run = run_of(tmp_path / "run", STARTED, found, ENDED)
    put_rings(run / "findings" / "3", [(9, 6), (7, 6), (6, 6), (9, 9)])
    bundles = Bundles(run, Retention(9, 1 << 30))
    bundles.put_finding(found)
    bundles.put_evidence("n1", EvidenceGiven(3, "m1", 1, stack='Thread 1 (idle): "MainThread"\n    wait (comm.py:3)\n'))
    bundles.close()
    answer = diagnose_paths([run])
    assert not [finding.kind for finding in answer.findings if finding.kind.endswith("_hang")]
    assert not answer.unread


def test_a_process_that_stands_behind_the_others_is_no_gpu(tmp_path):
    """keepstep's rings tell of calls of processes, with devices and without."""
    run = run_of(tmp_path / "run", STARTED)
    put_rings(run / "findings" / "3", [(7, 7), (7, 7), (7, 6), (7, 7), (8, 8)])
    assert {finding.layer for finding in diagnose_paths([run]).findings} <= {"undetermined"}


def test_stacks_of_a_hang_that_the_run_named_are_no_second_one(tmp_path):
    """The stacks name processes, whose ranks the run knew."""
    found = msgspec.structs.replace(SLOW, kind="noncommunication_hang", layer="host_cpu", number=1)
    run = run_of(tmp_path / "run", STARTED, found, ENDED)
    bundles = Bundles(run, Retention(9, 1 << 30))
    bundles.put_finding(found)
    for member, pid, frame in ((0, 70, "all_reduce"), (1, 71, "stuck"), (2, 72, "all_reduce")):
        where = "torch/distributed/distributed_c10d.py:9" if member != 1 else "train.py:5"
        stack = f'Process {pid}: (py-spy)\nThread {pid} (idle): "MainThread"\n    {frame} ({where})\n'
        bundles.put_evidence("n1", EvidenceGiven(1, f"m{member}", member, stack=stack))
    bundles.close()
    alone = diagnose_paths([run / "findings"]).findings
    assert [suspect["pid"] for group in named(alone) for suspect in group] == [71]
    assert named(diagnose_paths([run]).findings) == [[{"rank": 1}]]


def test_a_ring_in_which_nothing_was_recorded_is_nothing_to_tell(tmp_path):
    """Plain scripts have one, and standbys that never joined."""
    run = run_of(tmp_path / "run", STARTED, ENDED)
    put_rings(run / "incidents" / "1", [(7, 7), (7, 7)])
    (run / "incidents" / "1" / "n1-5.ring").write_bytes(bytes(80) + b"m5" + bytes(200_000))
    answer = diagnose_paths([run])
    assert not answer.unread and [finding.kind for finding in answer.findings] == ["healthy"]


def test_who_waits_when_somebody_died_is_no_second_fault(tmp_path):
    """Rank 2 had finished the collective in which the others waited when it crashed."""
    run = run_of(tmp_path / "run", STARTED, KILLED, LOSS, ENDED)
    for folder in ("incidents/1", "findings/4"):
        put_rings(run / folder, [(7, 6), (7, 6), (7, 7), (7, 6)])
    (finding,) = diagnose_paths([run]).findings
    assert (finding.kind, ranks([finding])) == ("crash", {2})


def test_what_a_bundle_says_itself_is_no_log(tmp_path):
    found = msgspec.structs.replace(KILLED, number=1, evidence=("the process of rank 2 was ended by SIGSEGV",))
    run = run_of(tmp_path / "run", STARTED, found, ENDED)
    bundles = Bundles(run, Retention(9, 1 << 30))
    bundles.put_finding(found)
    bundles.put_evidence("n1", EvidenceGiven(1, "m1", 1, counters=b'{"last": "Segmentation fault"}'))
    bundles.close()
    (finding,) = diagnose_paths([run]).findings
    assert ranks([finding]) == {2}
