"""Files of several jobs in one directory: each is judged by itself, and the report says whose finding it is."""

from __future__ import annotations

import json
import pickle

import pytest
from diagnosed_text import dump as told
from diagnosed_text import named, ranks, status, timeout
from dump_files import dump, entry, write
from test_diagnose_runs import ENDED, LOSS, STARTED, run_of
from test_ras import member, report

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
    words = failure_report(answer.findings)
    assert "2 faults found in the files of 2 jobs" in words
    assert "Job                   a\n" in words
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


SECOND_NS = 10**9


def at(dumps, second):
    """The same dumps with all calls made at another time."""
    for content in dumps.values():
        for item in content["entries"]:
            item["time_created_ns"] += second * SECOND_NS
    return dumps


def untimed(dumps):
    for content in dumps.values():
        for item in content["entries"]:
            item["time_created_ns"] = None
    return dumps


@pytest.mark.parametrize("name", ["job{}_rank_{{}}", "rank_{{}}_of_job_{}", "run{}_try7_rank{{}}"])
@pytest.mark.parametrize("both", [lambda dumps: dumps, untimed])
def test_names_that_differ_in_a_number(name, both, tmp_path):
    write(tmp_path, both(hang(2)), name=name.format(1).replace("rank_{}_of", "r_rank_{}_of"))
    write(tmp_path, both(at(hang(1, first=4), 60)), name=name.format(2).replace("rank_{}_of", "r_rank_{}_of"))
    answer = diagnose_paths([tmp_path])
    assert [(finding.kind, sorted(ranks([finding]))) for finding in answer.findings] == [
        ("noncommunication_hang", [2]),
        ("noncommunication_hang", [1]),
    ]
    assert len({finding.job for finding in answer.findings}) == 2


def test_worlds_of_two_sizes_by_a_number_in_their_names(tmp_path):
    write(tmp_path, hang(0, world=4), name="job1_dump_{}")
    write(tmp_path, hang(5, world=8, first=70), name="job2_dump_{}")
    assert by_job(diagnose_paths([tmp_path])) == {
        "job1_dump_#": ("noncommunication_hang", [0]),
        "job2_dump_#": ("noncommunication_hang", [5]),
    }


def test_one_rank_of_each_of_two_jobs(tmp_path):
    for folder, second in (("job1", 0), ("job2", 60)):
        dumps = at(hang(2), second)
        write(tmp_path / folder, {0: dumps[0]}, name="rank{}", as_json=True)
    assert {finding.job for finding in diagnose_paths([tmp_path]).findings} == {"job1", "job2"}


def test_the_same_dump_in_two_folders_is_one_job(tmp_path):
    for folder in ("now", "kept"):
        write(tmp_path / folder, {0: hang(2)[0]}, name="rank{}", as_json=True)
    assert {finding.job for finding in diagnose_paths([tmp_path]).findings} == {""}


def test_a_stale_dump_of_an_earlier_start_that_went_further(tmp_path):
    write(tmp_path, at(hang(2), 60), name="alpha_{}")
    stale = hang(1, first=70)
    write(tmp_path, {1: stale[1]}, name="beta_{}_x")
    answer = diagnose_paths([tmp_path])
    assert 2 in ranks(answer.findings) or {finding.kind for finding in answer.findings} == {"undetermined"}
    assert 1 not in ranks([one for one in answer.findings if one.confidence > 0.5])


def test_dumps_that_nothing_parts_are_not_compared(tmp_path):
    """Two starts whose files have names that tell nothing: each file has another number."""
    first, second = hang(2), at(hang(1, first=4), 60)
    for number, content in enumerate([*first.values(), *second.values()]):
        (tmp_path / f"dump_{number % 4}.{number}").write_bytes(pickle.dumps(content, protocol=2))
    (finding,) = diagnose_paths([tmp_path]).findings
    assert (finding.kind, finding.suspects) == ("undetermined", ())
    assert "two jobs" in finding.evidence[0]


def test_an_older_dump_of_the_same_process_is_told(tmp_path):
    folder = write(tmp_path / "dumps", hang(2))
    (folder / "old_rank_1").write_bytes(pickle.dumps(dump([entry(1, seq=1)], range(4)), protocol=2))
    (finding,) = diagnose_paths([folder]).findings
    assert any("rank 1: several dumps" in line for line in finding.evidence)


def test_tables_by_a_number_in_their_names(tmp_path):
    for job, slow in ((1, 2), (2, 1)):
        times(tmp_path / "t", slow)
        for path in (tmp_path / "t").iterdir():
            path.rename(tmp_path / f"job{job}_{path.name}")
        (tmp_path / "t").rmdir()
    assert by_job(diagnose_paths([tmp_path])) == {
        "job1_rank#": ("compute_slow", [2]),
        "job2_rank#": ("compute_slow", [1]),
    }


def test_parts_of_the_tables_of_one_job(tmp_path):
    """Each rank's steps in two files: one job."""
    for rank in range(4):
        for part in range(2):
            steps = range(30 * part, 30 * part + 30)
            rows = [f"{rank},{step},{130 if rank == 2 else 100}" for step in steps]
            (tmp_path / f"rank{rank}_part{part}.csv").write_text("rank,step,step_time_ms\n" + "\n".join(rows) + "\n")
    assert by_job(diagnose_paths([tmp_path])) == {"": ("compute_slow", [2])}


def ray(text, pid):
    """Lines as Ray prints them, with the process in front."""
    return "".join(f"(Worker pid={pid + int(line[5])}, ip=10.0.0.1) {line}" for line in text.splitlines(True))


@pytest.mark.parametrize(
    "names", [("trainA_1.log", "trainB_1.log"), ("train1.log", "train2.log"), ("a/x.log", "b/x.log")]
)
def test_logs_of_other_processes_of_the_same_ranks(names, tmp_path):
    for name, pid in zip(names, (100, 900), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ray(DIED, pid))
    answer = diagnose_paths([tmp_path])
    assert len({finding.job for finding in answer.findings}) == 2


def test_logs_of_the_same_processes_are_one_job_without_a_doubt(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "all.log").write_text(ray(DIED, 100))
    findings = diagnose_paths([tmp_path]).findings
    assert {finding.job for finding in findings} == {""}
    assert not any("two jobs" in line for finding in findings for line in finding.evidence)


STEPS = "".join(f"[rank{rank}]: step {step} loss 2.0\n" for step in range(3) for rank in (0, 1))


def test_steps_of_the_same_ranks_in_two_logs_are_told(tmp_path):
    (tmp_path / "train_1.log").write_text(STEPS)
    (tmp_path / "train_2.log").write_text(STEPS + BEHIND)
    findings = diagnose_paths([tmp_path]).findings
    assert all(any("two jobs" in line for line in finding.evidence) for finding in findings)
    assert all(finding.confidence <= 0.6 for finding in findings)


def test_reports_of_two_networks_of_communicators(tmp_path):
    for name, late in (("ras_1.json", 3), ("ras_2.json", 1)):
        members = [member(rank, 100 + rank, 2 if rank == late else 9) for rank in range(4)]
        (tmp_path / name).write_text(json.dumps(report((f"0x{name}", members, []))))
    assert by_job(diagnose_paths([tmp_path])) == {
        "ras_1": ("noncommunication_hang", [3]),
        "ras_2": ("noncommunication_hang", [1]),
    }


def test_time_outs_of_the_same_ranks_in_two_logs_are_told(tmp_path):
    for number, odd in (("1", 3), ("2", 1)):
        text = "".join(timeout(rank, 105) + status(rank, 107, 104) for rank in range(4) if rank != odd)
        (tmp_path / f"job{number}.log").write_text(text + told(odd, 104, 104, 0))
    (finding,) = diagnose_paths([tmp_path]).findings
    assert finding.confidence <= 0.6 and "may be the logs of two jobs: 4 ranks tell" in finding.evidence[-1]
