"""Files of several jobs in one directory: each is judged by itself, and the report says whose finding it is."""

from __future__ import annotations

import pickle

import pytest
from diagnosed_text import dump as told
from diagnosed_text import named, ranks, status, timeout
from dump_files import dump, entry, write
from test_diagnose_runs import ENDED, LOSS, STARTED, run_of

from keepstep.diagnosis.failure_report import failure_report
from keepstep.service.diagnosing import diagnose_paths


def hang(absent, *, first=5, world=4):
    """Dumps of a job in which `absent` does not call collective `first`."""
    dumps = {}
    for rank in range(world):
        entries = [entry(seq, seq=seq, state="completed") for seq in range(first - 3, first)]
        entries += [] if rank == absent else [entry(90, seq=first)]
        dumps[rank] = dump(entries, range(world))
    return dumps


def by_job(answer):
    return {finding.job: (finding.kind, sorted(ranks([finding]))) for finding in answer.findings}


BOTH = {"a": ("noncommunication_hang", [2]), "b": ("noncommunication_hang", [1])}


def test_dumps_of_two_jobs_in_two_folders(tmp_path):
    write(tmp_path / "a", hang(2), name="_dump_{}")
    write(tmp_path / "b", hang(1, first=70), name="_dump_{}")
    answer = diagnose_paths([tmp_path])
    assert by_job(answer) == BOTH
    report = failure_report(answer.findings)
    assert "2 faults found in the files of 2 jobs" in report
    assert "Job                   a\n" in report
    assert by_job(diagnose_paths([tmp_path / "a", tmp_path / "b"])) == BOTH


def test_dumps_of_two_jobs_in_one_folder_by_their_names(tmp_path):
    write(tmp_path, hang(2), name="first_rank_{}")
    write(tmp_path, hang(1, first=70), name="second_rank_{}")
    found = by_job(diagnose_paths([tmp_path]))
    assert sorted(found.values()) == sorted(BOTH.values())
    assert list(found) == ["first_rank_#", "second_rank_#"]


def test_a_job_without_a_fault_beside_one_with_a_fault(tmp_path):
    write(tmp_path / "a", hang(2), name="_dump_{}")
    write(tmp_path / "b", hang(9), name="_dump_{}")
    answer = diagnose_paths([tmp_path])
    assert [finding.kind for finding in answer.findings][0] == "noncommunication_hang"
    assert by_job(answer)["b"][0] in ("healthy", "communication_hang")
    assert answer.exit_code == 1


def test_the_logs_of_a_job_are_its_own(tmp_path):
    """What lies in the folder of a job is told of that job; what lies above is told of both."""
    for folder, absent in (("a", 2), ("b", 1)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "dumps", hang(absent), name="_dump_{}")
    (tmp_path / "a" / "rank2.log").write_text("Traceback (most recent call last):\nKeyError: 'y'\n")
    found = by_job(diagnose_paths([tmp_path]))
    assert found["b"] == BOTH["b"]
    assert any(job == "a" for job in found)


def test_logs_whose_dumps_are_not_known_leave_both_jobs_of_dumps_apart(tmp_path):
    write(tmp_path / "a", hang(2), name="_dump_{}")
    write(tmp_path / "b", hang(1), name="_dump_{}")
    for number in (4711, 4712):
        (tmp_path / f"slurm-{number}.out").write_text("step 1 loss 2.0\nstep 2 loss 1.0\n")
    found = by_job(diagnose_paths([tmp_path]))
    assert {job: found[job] for job in BOTH} == BOTH


def test_folders_of_nodes_are_one_job(tmp_path):
    dumps = hang(2)
    write(tmp_path / "n0", {rank: dumps[rank] for rank in (0, 1)}, name="_dump_{}")
    write(tmp_path / "n1", {rank: dumps[rank] for rank in (2, 3)}, name="_dump_{}")
    answer = diagnose_paths([tmp_path])
    assert by_job(answer) == {"": ("noncommunication_hang", [2])}


def test_dumps_of_worlds_of_two_sizes_are_not_compared(tmp_path):
    write(tmp_path, hang(9, world=4), name="job1_dump_{}")
    write(tmp_path, hang(1, world=8, first=70), name="job2_dump_{}")
    (finding,) = diagnose_paths([tmp_path]).findings
    assert (finding.kind, finding.suspects) == ("undetermined", ())
    assert "two jobs" in finding.evidence[0]


def times(folder, slow):
    folder.mkdir()
    for rank in range(4):
        rows = [f"{rank},{step},{130 if rank == slow else 100}" for step in range(30)]
        (folder / f"rank{rank}.csv").write_text("rank,step,step_time_ms\n" + "\n".join(rows) + "\n")


def test_tables_of_one_rank_each_in_two_folders(tmp_path):
    times(tmp_path / "a", 2)
    times(tmp_path / "b", 1)
    assert by_job(diagnose_paths([tmp_path])) == {"a": ("compute_slow", [2]), "b": ("compute_slow", [1])}


BEHIND = "".join(timeout(rank, 105) + status(rank, 107, 104) for rank in range(3)) + told(3, 104, 104, 0)
DIED = "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n[rank0]: step 3 loss 2\n"


def dated(text, day):
    return "".join(f"{day} 10:00:00 {line}" for line in text.splitlines(True))


@pytest.mark.parametrize("names", [("slurm-4711.out", "slurm-4712.out"), ("4711/job.log", "4712/job.log")])
def test_logs_under_two_job_numbers_of_slurm(names, tmp_path):
    for name, text in zip(names, (BEHIND, DIED), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        number = name[:4] if "/" in name else name[6:10]
        cancelled = f"slurmstepd: error: *** STEP {number}.0 ON n1 CANCELLED AT 2025-01-01T00:00:00 ***\n"
        (tmp_path / name).write_text(text + cancelled)
    answer = diagnose_paths([tmp_path])
    assert {finding.job: sorted(ranks([finding])) for finding in answer.findings} == {
        "Slurm job 4711": [3],
        "Slurm job 4712": [1],
    }


def test_logs_of_two_days(tmp_path):
    fine = "[rank0]: step 4 loss 2\n[rank1]: step 4 loss 2\n"
    for folder, text in (("x", dated(fine, "2025-03-01")), ("y", dated(DIED, "2025-03-02"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "all.log").write_text(text)
    assert by_job(diagnose_paths([tmp_path])) == {"x": ("healthy", []), "y": ("crash", [1])}


def test_logs_that_nothing_parts_are_one_job_and_the_doubt_is_told(tmp_path):
    for folder, text in (("x", BEHIND), ("y", DIED)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "all.log").write_text(text)
    findings = diagnose_paths([tmp_path]).findings
    assert {finding.job for finding in findings} == {""}
    assert all(any("two jobs" in line for line in finding.evidence) for finding in findings)


def test_two_runs_of_keepstep(tmp_path):
    run_of(tmp_path / "one", STARTED, LOSS, ENDED)
    run_of(tmp_path / "two", STARTED, ENDED)
    answer = diagnose_paths([tmp_path])
    assert {finding.job: finding.kind for finding in answer.findings} == {"gpt (one)": "crash", "gpt (two)": "healthy"}


def test_one_rank_in_two_files_is_a_copy(tmp_path):
    folder = write(tmp_path / "dumps", hang(2))
    (folder / "old_rank_1").write_bytes(pickle.dumps(dump([entry(1, seq=1)], range(4)), protocol=2))
    answer = diagnose_paths([folder])
    assert named(answer.findings) == [[{"rank": 2}]]
    assert {finding.job for finding in answer.findings} == {""}
