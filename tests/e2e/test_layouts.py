"""Every layout of the examples loses ranks in every role and ends with the bits of an undisturbed torchrun.

Shows G-1 and G-2 for tensor, pipeline and expert parallelism, FSDP2, HSDP, and their combination.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_jobs import LayoutJob, all_by_torchrun, by_torchrun

QUICK = {
    "ddp": "1:4:0",
    "fsdp2": "1:7:2",
    "tensor_parallel": "1:4:5",
    "pipeline": "1:7:3",
    "interleaved": "0:7:4",
    "expert_parallel": "1:4:6",
}
"""Layouts that two ranks can make, and who dies where: rank, step, communication call of the step."""

CHECKPOINTED = ("fsdp2", "pipeline")
"""Their state has no replica with as many ranks as are used here; the same is true of all layouts with two ranks."""


STEPS = ["--steps", "24"]


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of every layout with two ranks, undisturbed."""
    return all_by_torchrun(tmp_path_factory.mktemp("even"), list(QUICK), *STEPS, world=2)


def disturbed(tmp_path: Path, layout: str, deaths: list[str], *, world: int, standby: int) -> LayoutJob:
    """The job with all its losses, after a good end."""
    options = [word for death in deaths for word in ("--die", death)]
    saves = ["--checkpoints", str(tmp_path / "checkpoints")]
    job = LayoutJob(tmp_path / "run", layout, *STEPS, *saves, options=options, world=world, standby=standby)
    try:
        job.end()
        assert len(job.report()["incidents"]) == len(deaths), job.text()
    finally:
        job.process.kill()
    return job


@pytest.mark.parametrize("layout", QUICK)
def test_two_ranks_lose_one(tmp_path: Path, layout: str, even: dict[str, str]) -> None:
    job = disturbed(tmp_path, layout, [QUICK[layout]], world=2, standby=1)
    assert job.end() == even[layout], job.text()


def every_rank(world: int) -> list[str]:
    """Each rank dies once, at other calls of steps that lie apart; the last ones behind the agreement."""
    calls = ["0", "1", "update", "3", "5", "2", "update", "4"]
    return [f"{rank}:{3 + 2 * rank}:{calls[rank]}" for rank in range(world)]


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "tensor_parallel", "pipeline", "interleaved", "expert_parallel"])
def test_every_role_is_lost(tmp_path: Path, layout: str) -> None:
    """First, middle and last stage, every coordinate of data, tensor and expert parallelism, one after the other."""
    job = disturbed(tmp_path, layout, every_rank(4), world=4, standby=2)
    assert job.end() == by_torchrun(tmp_path / "even", layout, *STEPS, world=4), job.text()
    if layout not in CHECKPOINTED:
        assert job.steps_recomputed() == [0, 0, 0, 0]


@pytest.mark.long
@pytest.mark.exhaustive
def test_every_role_of_eight_ranks_is_lost(tmp_path: Path) -> None:
    job = disturbed(tmp_path, "tp_pp_dp", every_rank(8), world=8, standby=3)
    assert job.end() == by_torchrun(tmp_path / "even", "tp_pp_dp", *STEPS, world=8), job.text()
    assert job.steps_recomputed() == [0] * 8


@pytest.mark.long
@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", (1, 2)), ("interleaved", (0, 1))])
def test_neighbouring_stages_are_lost_at_once(tmp_path: Path, layout: str, ranks: tuple[int, int]) -> None:
    """Neither joiner can ask the other for the shapes it sends: all prepare their schedules anew."""
    job = disturbed(tmp_path, layout, [f"{rank}:7:update" for rank in ranks], world=4, standby=2)
    assert job.end() == by_torchrun(tmp_path / "even", layout, *STEPS, world=4), job.text()
    assert any(go["anew"] for go in job.records("Go"))
