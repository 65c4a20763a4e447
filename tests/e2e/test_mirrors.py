"""State without a live replica comes from where it was kept: a mirror, local disk, shared storage, in this order.

Shows G-25 (a mirror costs at most the step that was under way) and G-14 (a corrupt checkpoint is skipped for an older
one) on real processes; the final weights are those of an undisturbed run (G-2).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusters import Cluster, toy
from jobs import RunningJob, run_and_kill, run_to_end
from test_change import damage, facts, pid_of, wait_for


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed job with FSDP2."""
    job = run_to_end(tmp_path_factory.mktemp("even") / "run", "--fsdp", standby=0)
    return job.report()["weights_sha256"]


def repaired(job: RunningJob, even: str) -> dict:
    """The first incident of a job that ended in the right weights."""
    assert job.finish() == 0, job.text()
    assert job.report()["weights_sha256"] == even, job.text()
    return job.report()["incidents"][0]


@pytest.mark.parametrize(
    "point",
    [
        "collective:2",
        *(pytest.param(point, marks=pytest.mark.long) for point in ("forward", "agreed", "updating", "updated")),
    ],
)
def test_a_lost_shard_comes_from_its_mirror(tmp_path: Path, even: str, point: str) -> None:
    """G-25: no checkpoint is there. A loss after the agreement costs one step, one before it at most one."""
    incident = repaired(run_and_kill(tmp_path / "run", [f"2:7:{point}"], "--fsdp"), even)
    assert incident["source"] == "mirror" and "mirror in the memory of rank 3" in incident["note"]
    assert incident["steps_recomputed"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("point", ["forward", "updated"])
def test_an_iterator_goes_on_in_the_joiner_and_goes_back_a_step_in_the_others(
    tmp_path: Path, even: str, point: str
) -> None:
    job = run_and_kill(tmp_path / "run", [f"2:7:{point}"], "--fsdp", "--generator")
    incident = repaired(job, even)
    assert incident["source"] == "mirror" and "is an iterator" in job.text()


@pytest.mark.exhaustive
@pytest.mark.long
def test_iterators_that_cannot_go_back_to_the_checkpoint_start_again(tmp_path: Path, even: str) -> None:
    words = ("--fsdp", "--generator", "--no-mirror", "--checkpoint", str(tmp_path / "checkpoints"))
    incident = repaired(run_and_kill(tmp_path / "run", ["2:7:forward"], *words), even)
    assert "restart 1 of" in incident["note"]


@pytest.mark.long
def test_a_holder_that_is_frozen_inside_a_mirror_holds_nobody_up(tmp_path: Path, even: str) -> None:
    """G-25: rank 3 stands still with half the mirror of rank 2 for as long as it likes; all others train on."""
    marker = tmp_path / "marker"
    words = ("--fsdp", "--freeze-holder", "3:5", "--marker", str(marker), "--pace", "0.2")
    job = RunningJob(tmp_path / "run", *words, "--out", str(tmp_path / "run-out"))
    frozen = int(job.wait_for(Path(f"{marker}.frozen"), limit_s=300))
    wait_for(job, lambda: any((f["kind"], f.get("generation")) == ("FirstStep", 1) for f in facts(job)))
    assert Path(f"/proc/{frozen}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", job.text()
    os.kill(frozen, signal.SIGCONT)
    incident = repaired(job, even)
    assert incident["kind"] == "noncommunication_hang" and incident["rank"] == 3
    assert incident["source"] == "mirror" and incident["steps_recomputed"] <= 1
    assert len(job.report()["incidents"]) == 1, job.text()


@pytest.mark.long
def test_two_losses_with_owner_and_holder_go_to_the_next_rung(tmp_path: Path, even: str) -> None:
    """Rank 3 holds the mirror of rank 2."""
    words = ("--fsdp", "--checkpoint", str(tmp_path / "checkpoints"), "--pace", "0.1")
    job = run_and_kill(tmp_path / "run", ["2:7:forward", "3:7:forward"], *words, standby=2)
    incident = repaired(job, even)
    assert incident["source"] == "shared" and incident["steps_recomputed"] >= 3


@pytest.mark.long
def test_the_holder_is_lost_while_the_mirror_is_asked_for(tmp_path: Path, even: str) -> None:
    """The next rung is the local disk, which has every step."""
    words = ("--fsdp", "--checkpoint", str(tmp_path / "shared"), "--local", str(tmp_path / "local"), "--pace", "0.1")
    job = run_and_kill(tmp_path / "run", ["2:7:forward"], *words, standby=2)
    wait_for(job, lambda: any(f["kind"] == "AskMirrors" for f in facts(job)))
    os.kill(pid_of(job, "m3"), signal.SIGKILL)
    incident = repaired(job, even)
    assert incident["source"] in ("local", "mirror") and incident["steps_recomputed"] <= 2


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_corrupt_checkpoint_on_disk_gives_way_to_an_older_one(tmp_path: Path, even: str) -> None:
    """G-14"""
    shared, local = tmp_path / "shared", tmp_path / "local"
    words = ("--fsdp", "--no-mirror", "--checkpoint", str(shared), "--local", str(local))
    marker = tmp_path / "marker"
    job = RunningJob(tmp_path / "run", *words, "--hold", "2:10:forward", "--marker", str(marker))
    lost = int(job.wait_for(Path(f"{marker}.0")))
    (node,) = local.iterdir()
    wait_for(job, lambda: len(list((node / "step-00000010").glob("rank-*.json"))) == 4)
    damage(node / "step-00000010", "corrupt")
    os.kill(lost, signal.SIGKILL)
    incident = repaired(job, even)
    assert incident["source"] == "local" and incident["steps_recomputed"] == 1
    assert "step 10" in job.text()


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_whole_node_is_lost_with_all_its_shards_and_what_only_its_ranks_knew(tmp_path: Path) -> None:
    """G-25: mirrors are on the other node, random numbers and data positions, too."""
    script = ("--fsdp", "--steps", 60, "--pace", 0.1)
    job = run_to_end(tmp_path / "even", *map(str, script), standby=0)
    out = tmp_path / "out"
    words = ("--nproc-per-node", 2, "--standby", 2)
    with Cluster(tmp_path, nnodes=2, words=words, script=toy(out, *script)) as cluster:
        cluster.agent("a")
        cluster.agent("b")
        cluster.until(lambda: cluster.text().count("is warm") >= 4, "standbys")
        log = out / "rank-0.log"
        cluster.until(lambda: log.exists() and log.read_text().count("\n") >= 3, "some steps, the first mirrors")
        os.kill(cluster.agent_of("b").pid, signal.SIGKILL)
        assert cluster.finish() == 0, cluster.text()
        assert cluster.report["weights_sha256"] == job.report()["weights_sha256"]
        (incident,) = cluster.report["incidents"]
        assert incident["source"] == "mirror" and incident["steps_recomputed"] <= 1
