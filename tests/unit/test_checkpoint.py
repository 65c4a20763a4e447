"""A checkpoint counts when all its parts are there and whole; damaged ones are skipped and named (G-14)."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from keepstep.errors import StateError, StoreError
from keepstep.training.checkpoint import CheckpointWriter, load, step_directory, valid_steps
from keepstep.training.host_memory import Block
from keepstep.training.state import TrackedState

WORLD = 3


def member(seed: int, *, role: str = "", width: int = 60) -> TrackedState:
    """A small state with two updates."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(2, width)).sum().backward()
        optimizer.step()
    return TrackedState(net, optimizer, role=role)


def writers_in(directory: Path, *, keep: int = 3) -> list[CheckpointWriter]:
    """One of each rank."""
    return [CheckpointWriter(directory, rank=rank, world=WORLD, keep=keep) for rank in range(WORLD)]


def write(
    directory: Path, steps: list[int], *, writers: list[CheckpointWriter] | None = None, written_in: str = ""
) -> list[TrackedState]:
    """Ranks 0 and 2 hold the same state, rank 1 another one."""
    states = [member(1, role="a"), member(2, role="b"), member(1, role="a")]
    replicas = {rank: state.replica_key() for rank, state in enumerate(states)}
    writers = writers or writers_in(directory)
    for step in steps:
        for rank, writer in enumerate(writers):
            private = f"{rank}@{step}".encode()
            writer.save(step, states[rank], private=private, replicas=replicas, written_in=written_in)
        for writer in writers:
            writer.wait()
    for writer in writers:
        writer.close()
    return states


def names_in(directory: Path) -> list[str]:
    """The directories of the steps that are there."""
    return sorted(place.name for place in directory.iterdir())


def test_every_rank_finds_its_state_and_its_private_part(tmp_path: Path) -> None:
    states = write(tmp_path, [10])
    for rank, role in enumerate("aba"):
        assert valid_steps(tmp_path, rank=rank, world=WORLD) == ([10], [])
        fresh = member(9, role=role)
        assert load(tmp_path, 10, rank=rank, world=WORLD, state=fresh) == f"{rank}@10".encode()
        assert fresh.digest() == states[rank].digest()


def test_state_of_a_replica_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, [10])
    data = sorted(path.name for path in step_directory(tmp_path, 10).glob("*.distcp"))
    assert data == ["__0_0.distcp", "__1_0.distcp"]
    page = json.loads((step_directory(tmp_path, 10) / "rank-00002.json").read_text())
    assert page["holder"] == 0 and page["world"] == WORLD and page["version"] == 2 and len(page["sha256"]) == 64


def test_the_copy_is_taken_before_training_goes_on(tmp_path: Path) -> None:
    state = member(1)
    before = state.digest()
    writer = CheckpointWriter(tmp_path, rank=0, world=1)
    writer.save(1, state, private=b"")
    writer.settle()
    with torch.no_grad():
        state.modules["model"].weight.zero_()
    assert writer.valid_steps() == ([1], [])
    assert writer.load(1, state) == b""
    assert state.digest() == before
    writer.close()


def damage(place: Path, how: str) -> None:
    """Spoil the file of rank 0 or its page."""
    file, page = place / "__0_0.distcp", place / "rank-00000.json"
    if how == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "missing":
        file.unlink()
    elif how == "page_missing":
        page.unlink()
    elif how == "page_torn":
        page.write_bytes(page.read_bytes()[:40])
    elif how == "newer":
        page.write_text(page.read_text().replace('"version": 2', '"version": 3'))
    elif how == "world":
        page.write_text(page.read_text().replace('"world": 3', '"world": 8'))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("torn", "torn"),
        ("flipped", "corrupt"),
        ("missing", "missing"),
        ("page_missing", "missing"),
        ("page_torn", "not a checkpoint page"),
        ("newer", "version 3"),
        ("world", "8 ranks"),
    ],
)
def test_damaged_steps_are_skipped_and_named(tmp_path: Path, how: str, words: str) -> None:
    write(tmp_path, [10, 20])
    damage(step_directory(tmp_path, 20), how)
    for rank in (0, 2):
        steps, skipped = valid_steps(tmp_path, rank=rank, world=WORLD)
        assert steps == [10]
        assert len(skipped) == 1 and skipped[0].startswith("step 20: ") and words in skipped[0]
        state = member(9, role="a")
        before = state.digest()
        with pytest.raises(StoreError, match="step 20"):
            load(tmp_path, 20, rank=rank, world=WORLD, state=state)
        assert state.digest() == before
    if how in ("torn", "flipped"):
        assert valid_steps(tmp_path, rank=1, world=WORLD)[0] == [10, 20]


def test_metadata_that_is_damaged_is_named_and_made_anew(tmp_path: Path) -> None:
    write(tmp_path, [10, 20])
    metadata = step_directory(tmp_path, 10) / ".metadata"
    told: list[str] = []
    writer = CheckpointWriter(tmp_path, rank=0, world=WORLD, on_problem=told.append)
    assert writer.valid_steps() == ([10, 20], []) and not told
    for damaged in (b"\x07" * 300, metadata.read_bytes()[:-1], None):
        if damaged is None:
            metadata.unlink()
        else:
            metadata.write_bytes(damaged)
        assert writer.valid_steps() == ([10, 20], [])
        assert told.pop() == "checkpoint of step 10: .metadata is damaged or not there; it is made anew"
        wanted = {"model": nn.Linear(60, 60).state_dict()}
        dcp.load(wanted, checkpoint_id=metadata.parent, no_dist=True)
        assert writer.valid_steps() == ([10, 20], []) and not told


def test_a_file_in_the_place_of_a_step_is_named(tmp_path: Path) -> None:
    problems: list[str] = []
    writer = CheckpointWriter(tmp_path, rank=0, world=1, on_problem=problems.append)
    step_directory(tmp_path, 15).touch()
    assert writer.valid_steps() == ([], ["step 15: step-00000015 is no directory"])
    writer.save(15, member(1), private=b"")
    writer.close()
    assert len(problems) == 1 and problems[0].endswith(
        f"-> move {step_directory(tmp_path, 15)} away: there must be a directory"
    )


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [10])
    assert valid_steps(tmp_path, rank=0, world=4)[0] == []
    with pytest.raises(StateError):
        load(tmp_path, 10, rank=0, world=WORLD, state=member(1, role="a", width=8))
    assert valid_steps(tmp_path / "nowhere", rank=0, world=1) == ([], [])


def test_only_the_newest_complete_steps_are_kept(tmp_path: Path) -> None:
    writers = writers_in(tmp_path, keep=2)
    write(tmp_path, [1, 2, 3, 4], writers=writers)
    kept = set(names_in(tmp_path))
    assert {"step-00000003", "step-00000004"} <= kept <= {"step-00000002", "step-00000003", "step-00000004"}
    for writer in writers:
        writer.retain()
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]


def test_incomplete_steps_do_not_push_out_complete_ones(tmp_path: Path) -> None:
    writers = writers_in(tmp_path, keep=1)
    write(tmp_path, [1], writers=writers)
    for step in (2, 3):
        writers[0].save(step, member(1, role="a"), private=b"")
    writers[0].close()
    steps, skipped = valid_steps(tmp_path, rank=0, world=WORLD)
    missing = [f"step {step}: the parts of ranks [1, 2] are missing" for step in (2, 3)]
    assert steps == [1] and skipped == missing


def test_newer_steps_of_a_larger_world_do_not_push_out_what_is_written_now(tmp_path: Path) -> None:
    write(tmp_path, [800, 900, 1000])
    writer = CheckpointWriter(tmp_path, rank=0, world=1, keep=3)
    for step in (100, 200, 300, 400):
        writer.save(step, member(1), private=b"")
    assert writer.valid_steps()[0] == [200, 300, 400]
    for step in (800, 1000, 1200):
        writer.save(step, member(1), private=b"")
    assert writer.valid_steps()[0] == [800, 1000, 1200]
    writer.close()


def test_newer_steps_that_are_damaged_do_not_push_out_what_is_written_now(tmp_path: Path) -> None:
    write(tmp_path, [70, 80, 90])
    for step in (80, 90):
        damage(step_directory(tmp_path, step), "torn")
    writers = writers_in(tmp_path, keep=2)
    for rank, writer in enumerate(writers):
        writer.load(70, member(9, role="aba"[rank]))
    write(tmp_path, [71, 72, 73], writers=writers)
    for rank, writer in enumerate(writers):
        writer.retain()
        assert valid_steps(tmp_path, rank=rank, world=WORLD)[0][:2] == [72, 73]


def test_a_checkpoint_of_mixed_worlds_is_complete_for_nobody(tmp_path: Path) -> None:
    write(tmp_path, [10])
    writer = CheckpointWriter(tmp_path, rank=0, world=2, keep=1)
    for step in (5, 10):
        writer.save(step, member(1), private=b"")
    writer.close()
    assert "step-00000005" in names_in(tmp_path)
    assert not (step_directory(tmp_path, 10) / ".metadata").exists()


def test_parts_of_two_generations_make_no_checkpoint(tmp_path: Path) -> None:
    states = write(tmp_path, [10, 20], written_in="job/1")
    writers = writers_in(tmp_path, keep=1)
    writers[0].load(10, states[0])
    writers[0].save(20, states[0], private=b"", written_in="job/2")
    writers[0].close()
    assert [writer.written_in(20) for writer in writers] == ["job/2", "job/1", "job/1"]
    steps, skipped = valid_steps(tmp_path, rank=2, world=WORLD)
    assert steps == [10] and skipped == ["step 20: the parts of ranks 2 and 0 were not written in one generation"]
    assert not (step_directory(tmp_path, 20) / ".metadata").exists()
    assert valid_steps(tmp_path, rank=0, world=WORLD)[0] == [10, 20], "only the controller sees what all have"
    write(tmp_path, [20], written_in="job/2")
    assert (step_directory(tmp_path, 20) / ".metadata").exists()


def test_the_newest_step_is_one_that_was_written_or_loaded_here(tmp_path: Path) -> None:
    writers = writers_in(tmp_path)
    assert writers[0].newest(99) == -1
    state = write(tmp_path, [10, 20], writers=writers)[0]
    assert [writers[0].newest(version) for version in (9, 19, 20, 99)] == [-1, 10, 20, 20]
    later = writers_in(tmp_path)[0]
    assert later.newest(99) == -1
    later.load(10, state)
    assert later.newest(99) == 10


def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path: Path) -> None:
    problems: list[str] = []
    state = member(1)
    writer = CheckpointWriter(tmp_path, rank=0, world=1, on_problem=problems.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        for step in (1, 2):
            writer.save(step, state, private=b"")
        writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(problems) == 1 and "step 1" in problems[0] and str(tmp_path) in problems[0]
    assert not list(tmp_path.rglob("*.tmp"))
    writer.save(3, state, private=b"")
    writer.close()
    steps, skipped = valid_steps(tmp_path, rank=0, world=1)
    assert steps == [3] and len(skipped) == 2


def test_refused_memory_is_reported_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Block:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    problems: list[str] = []
    state = member(1)
    writer = CheckpointWriter(tmp_path, rank=0, world=1, on_problem=problems.append)
    with monkeypatch.context() as patch:
        patch.setattr("keepstep.training.checkpoint.Block", refuse)
        for step in (1, 2):
            writer.save(step, state, private=b"")
            writer.settle()
    assert len(problems) == 1 and "checkpoint of step 1 was not written: " in problems[0]
    assert "Cannot allocate memory; training goes on without it -> free memory on this node" in problems[0]
    writer.save(3, state, private=b"")
    writer.close()
    assert valid_steps(tmp_path, rank=0, world=1) == ([3], [])
