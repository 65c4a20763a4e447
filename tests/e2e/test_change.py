"""Membership changes: who stays, what diverged, what is restored, failures inside the change itself.

Shows G-6 (a user's exception swaps nothing), G-7 (stayers keep processes and sockets), G-11 (losses inside a change),
G-13 (a diverged replica is named) and G-14 (torn checkpoints are skipped) on real processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import RunningJob, run_and_kill, run_to_end
from test_lost_ranks import same_end


def facts(job: RunningJob) -> list[dict]:
    """All facts and orders of the journal so far, in order."""
    journal = job.directory / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [r.get("fact") or r.get("order") for r in records if r["record"] in ("FactRecord", "OrderRecord")]


def wait_for(job: RunningJob, condition, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert job.process.poll() is None and time.monotonic() < end, job.text()
        time.sleep(0.001)


def pid_of(job: RunningJob, member: str) -> int:
    return next(f["pid"] for f in facts(job) if f["kind"] == "MemberStarted" and f["member"] == member)


def socket_inodes(pid: int) -> set[str]:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return {link for link in links if re.match(r"socket:", link)}


def test_stayers_keep_their_processes_and_connections(tmp_path: Path, undisturbed: RunningJob) -> None:
    """The links between stayers are the same sockets before and after; their pids are unchanged."""
    marker = tmp_path / "run-marker"
    job = RunningJob(
        tmp_path / "run",
        "--hold",
        "2:5:forward",
        "--marker",
        str(marker),
        "--out",
        str(tmp_path / "run-out"),
        "--pace",
        "0.2",
    )
    lost = int(job.wait_for(Path(f"{marker}.0")))
    stayers = [pid_of(job, f"m{rank}") for rank in (0, 1, 3)]
    before = {pid: socket_inodes(pid) for pid in stayers}
    os.kill(lost, signal.SIGKILL)
    wait_for(job, lambda: any(f["kind"] == "FirstStep" for f in facts(job)))
    for pid in stayers:
        kept = before[pid] & socket_inodes(pid)
        assert len(kept) >= len(before[pid]) - 6, "only the links to the lost rank may go"
        assert len(kept) >= 4
    same_end(job, undisturbed, losses=1)
    pids = {line.rsplit(" ", 1)[1] for rank in (0, 1, 3) for line in (job.out / f"rank-{rank}.log").open()}
    assert {int(pid) for pid in pids} == set(stayers)


def test_joiner_killed_in_the_change(tmp_path: Path, undisturbed: RunningJob) -> None:
    job = run_and_kill(tmp_path / "run", ["2:4:collective:0"], standby=2)

    def joiner() -> str | None:
        return next((f.get("member", "") for f in welcomes(job)), None)

    wait_for(job, joiner)
    os.kill(pid_of(job, joiner() or ""), signal.SIGKILL)
    same_end(job, undisturbed, losses=2)


def welcomes(job: RunningJob) -> list[dict]:
    """Orders that made a standby a member, with the member's name."""
    text = (job.directory / "journal.jsonl").read_text().splitlines(keepends=True)
    lines = [json.loads(line) for line in text if line.endswith("\n")]
    orders = [r for r in lines if r["record"] == "OrderRecord" and r["order"]["kind"] == "Welcome"]
    return [{"member": r["target"], **r["order"]} for r in orders if r["order"]["joiner"]]


def test_stayer_killed_in_the_change(tmp_path: Path, undisturbed: RunningJob) -> None:
    job = run_and_kill(tmp_path / "run", ["2:4:collective:0"], standby=2)
    wait_for(job, lambda: welcomes(job))
    os.kill(pid_of(job, "m0"), signal.SIGKILL)
    same_end(job, undisturbed, losses=2)


def test_standby_killed_before_it_is_needed(tmp_path: Path, undisturbed: RunningJob) -> None:
    job = RunningJob(tmp_path / "run", "--out", str(tmp_path / "run-out"), "--pace", "0.3")
    wait_for(job, lambda: any(f["kind"] == "Hello" and f["rank"] == -1 for f in facts(job)))
    os.kill(pid_of(job, "m4"), signal.SIGKILL)
    same_end(job, undisturbed, losses=0)


def test_diverged_replica_is_named_and_not_used(tmp_path: Path, undisturbed: RunningJob) -> None:
    """One bit of a replica flips, a loss follows: the finding names it, the joiner takes the state of the others."""
    job = run_and_kill(tmp_path / "run", ["3:6:forward"], "--flip", "1:4")
    job.finish()
    records = [json.loads(line) for line in (job.directory / "journal.jsonl").read_text().splitlines()]
    findings = [r for r in records if r["record"] == "Finding" and r["kind"] == "state_divergence"]
    assert [f["suspects"] for f in findings] == [[[{"rank": 1}]]], job.text()
    fetch = next(f for f in facts(job) if f["kind"] == "Fetch")
    assert sorted(fetch["sources"]) == [0, 2]


@pytest.mark.parametrize("harm", ["", "corrupt", "torn"])
def test_sharded_state_comes_from_the_newest_valid_checkpoint(tmp_path: Path, harm: str) -> None:
    """FSDP2 shards have no replica: all go back to the newest checkpoint whose hashes are right."""
    expected = run_to_end(tmp_path / "even", "--fsdp", standby=0)
    checkpoints = tmp_path / "checkpoints"
    marker = tmp_path / "run-marker"
    job = RunningJob(
        tmp_path / "run",
        "--fsdp",
        "--no-mirror",
        "--checkpoint",
        str(checkpoints),
        "--hold",
        "2:10:forward",
        "--marker",
        str(marker),
        "--out",
        str(tmp_path / "run-out"),
    )
    lost = int(job.wait_for(Path(f"{marker}.0")))
    wait_for(job, lambda: len(list((checkpoints / "step-00000008").glob("rank-*.json"))) == 4)
    damage(checkpoints / "step-00000008", harm)
    os.kill(lost, signal.SIGKILL)
    assert job.finish() == 0, job.text()
    assert job.report()["weights_sha256"] == expected.report()["weights_sha256"]
    assert job.report()["incidents"][0]["steps_recomputed"] == (2 if not harm else 6)
    if harm:
        assert "step-00000008" in job.text() or "step 8" in job.text()


def damage(directory: Path, harm: str) -> None:
    """Harm the newest checkpoint."""
    victim = sorted(path for path in directory.iterdir() if path.suffix != ".json")[1]
    data = bytearray(victim.read_bytes())
    if harm == "corrupt":
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif harm == "torn":
        victim.write_bytes(data[: len(data) // 2])


def test_collective_between_steps_is_never_garbage(tmp_path: Path, undisturbed: RunningJob) -> None:
    """A loss cuts a collective behind the block: it raises, and the job starts again and ends in the same weights."""
    job = run_and_kill(tmp_path / "run", ["1:5:tail"], "--tail", "--checkpoint", str(tmp_path / "checkpoints"))
    assert job.finish() == 0, job.text()
    assert "was cut" in job.text()
    assert job.report()["weights_sha256"] == undisturbed.report()["weights_sha256"]


def test_python_exception_swaps_nothing(tmp_path: Path) -> None:
    """The traceback is shown, the job ends with the script's exit code, nobody is replaced."""
    job = RunningJob(tmp_path / "run", "--raise-at", "1:3")
    assert job.finish() == 1
    assert "the user's own mistake" in job.text() and "Traceback" in job.text()
    assert not welcomes(job) and job.report()["incidents"] == []


def test_same_crash_after_a_swap_is_the_users(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", "--die-at", "1:3")
    assert job.finish() == 128 + signal.SIGABRT, job.text()
    assert "an error of the script" in job.text()
    assert len(welcomes(job)) == 1


def processes_of(directory: Path) -> list[str]:
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if str(directory) in line and "ps -eo" not in line and str(os.getpid()) not in line]


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", "--pace", "0.5", "--out", str(tmp_path / "run-out"))
    job.wait_for(tmp_path / "run-out" / "rank-0.log")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT
    assert processes_of(tmp_path) == []
