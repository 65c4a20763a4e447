"""File operations as scripts make them, for real: what was written, renamed and removed is so for the script alone."""

from __future__ import annotations

import bz2
import glob
import io
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from os import remove as removed_by_another_name
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep.training.scratch_files import ScratchFiles, remove_scratch
from keepstep.training.scratch_layers import REAL


def contents(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


WORLD = {"a.bin": "a", "b.bin": "b", "old/x": "x", "old/deep/y": "y", "kept.txt": "kept"}


class Tried:
    """A folder of the world, and files that are kept from it."""

    def __init__(self, folder: Path) -> None:
        self.world = folder / "world"
        for name, text in WORLD.items():
            (self.world / name).parent.mkdir(parents=True, exist_ok=True)
            (self.world / name).write_text(text)
        (folder / "scratch").mkdir()
        self.told: list[tuple[str, str]] = []
        self.scratch = ScratchFiles(folder / "scratch", told=lambda what, path: self.told.append((what, path)))


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    """The current directory is the world's; all of it is as it was at the end."""
    one = Tried(tmp_path)
    monkeypatch.chdir(one.world)
    one.scratch.enter()
    try:
        yield one
    finally:
        one.scratch.leave()
    os.chdir(one.world)
    assert contents(one.world) == WORLD
    assert sorted(os.listdir(one.world)) == ["a.bin", "b.bin", "kept.txt", "old"]


def test_a_directory_removed_and_made_again_is_empty(tried: Tried) -> None:
    shutil.rmtree("old")
    assert not os.path.exists("old") and not os.path.lexists("old/x") and "old" not in os.listdir()
    with pytest.raises(FileNotFoundError):
        Path("old/x").read_text()
    with pytest.raises(FileNotFoundError):
        Path("old/new").write_text("x")
    os.makedirs("old")
    assert os.listdir("old") == [] and not Path("old/deep").exists()
    Path("old/x").write_text("again")
    assert contents(Path("old")) == {"x": "again"}
    shutil.rmtree("old")
    assert not Path("old").exists()
    assert {path for what, path in tried.told if what == "remove"} >= {str(tried.world / "old/x")}


def test_what_is_there_already_is_there(tried: Tried) -> None:
    with pytest.raises(FileExistsError):
        os.mkdir("old")
    with pytest.raises(FileExistsError):
        Path("a.bin").touch(exist_ok=False)
    with pytest.raises(FileExistsError):
        os.open("a.bin", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("old")
    with pytest.raises(IsADirectoryError):
        os.remove("old")
    with pytest.raises(IsADirectoryError):
        Path("old").write_text("x")
    with pytest.raises(NotADirectoryError):
        os.rmdir("a.bin")


def test_what_is_not_there_is_missed(tried: Tried) -> None:
    for missed in (
        lambda: Path("none/x").write_text("x"),
        lambda: np.memmap("none"),
        lambda: os.open("none", os.O_WRONLY),
        lambda: os.remove("none"),
        lambda: os.rename("none", "x"),
        lambda: os.truncate("none", 0),
        lambda: os.mkdir("none/x"),
        lambda: torch.save(1, "none/x.pt"),
    ):
        with pytest.raises((FileNotFoundError, RuntimeError)):
            missed()
    assert not os.access("none", os.F_OK) and os.access("a.bin", os.R_OK)


def test_listings_hold_both_layers(tried: Tried) -> None:
    os.makedirs("out/deep")
    Path("out/log").write_text("began")
    assert sorted(glob.glob("*.bin")) == ["a.bin", "b.bin"]
    Path("c.bin").write_text("c")
    os.remove("a.bin")
    assert sorted(glob.glob("*.bin")) == ["b.bin", "c.bin"] == sorted(path.name for path in Path().glob("*.bin"))
    assert sorted(os.listdir()) == ["b.bin", "c.bin", "kept.txt", "old", "out"] == sorted(os.listdir(os.getcwd()))
    assert sorted(os.listdir(b".")) == [b"b.bin", b"c.bin", b"kept.txt", b"old", b"out"]
    with os.scandir() as entries:
        found = {entry.name: (entry.is_dir(), entry.is_file(), entry.path) for entry in entries}
    assert found["old"] == (True, False, "./old") and found["c.bin"] == (False, True, "./c.bin")
    assert sorted(glob.glob("**/*", recursive=True)) == sorted(
        ["b.bin", "c.bin", "kept.txt", "old", "old/x", "old/deep", "old/deep/y", "out", "out/deep", "out/log"]
    )
    walked = {folder: (sorted(folders), sorted(files)) for folder, folders, files in os.walk(".")}
    assert walked["."] == (["old", "out"], ["b.bin", "c.bin", "kept.txt"]) and walked["./old"] == (["deep"], ["x"])
    assert {folder for folder, *_ in os.fwalk(".")} == set(walked)


def test_files_change_in_place(tried: Tried) -> None:
    with open("kept.txt", "a") as file:
        file.write(" more")
    with open("a.bin", "r+") as file:
        file.write("A")
    os.truncate("b.bin", 0)
    with open("old/x", "bw") as raw:
        raw.write(b"new")
    assert Path("kept.txt").read_text() == "kept more" and contents(tried.world)["b.bin"] == ""
    assert Path("a.bin").read_text() == "A" and Path("old/x").read_text() == "new"
    descriptor = os.open("kept.txt", os.O_WRONLY | os.O_TRUNC)
    os.close(descriptor)
    assert os.stat("kept.txt").st_size == 0
    (first,) = {what for what, _ in tried.told}
    assert first == "write"


def test_an_array_on_disk_of_any_size_changes_in_place(tried: Tried, tmp_path: Path) -> None:
    """`np.memmap` opens with "r+" unless told otherwise."""
    large = tmp_path / "large"
    tried.scratch.leave()
    with open(large, "wb") as file:
        file.truncate(260 << 20)
        file.write(b"\1")
    tried.scratch.enter()
    array = np.memmap(large, dtype=np.uint8)
    assert array.shape == (260 << 20,) and array[0] == 1
    array[0] = 7
    array.flush()
    assert np.memmap(large, dtype=np.uint8, mode="r")[0] == 7
    del array
    tried.scratch.leave()
    with open(large, "rb") as file:
        assert file.read(1) == b"\1"


def test_directories_are_renamed(tried: Tried) -> None:
    os.rename("old", "new")
    assert not os.path.exists("old") and contents(Path("new")) == {"x": "x", "deep/y": "y"}
    Path("new/x").write_text("changed")
    Path("new/deep/z").write_text("z")
    os.remove("new/deep/y")
    assert contents(Path("new")) == {"x": "changed", "deep/z": "z"}
    os.rename("new/deep", "deep")
    Path("new").rename("newer")
    assert contents(Path("newer")) == {"x": "changed"} and contents(Path("deep")) == {"z": "z"}
    os.mkdir("old")
    os.replace("newer/x", "old/x")
    assert contents(Path("old")) == {"x": "changed"}
    shutil.rmtree("newer")
    shutil.move("deep", "old")
    assert contents(Path("old")) == {"x": "changed", "deep/z": "z"}
    with pytest.raises(OSError, match="not empty"):
        os.rename("old/deep", os.path.join(tried.world, "old"))


def test_a_renamed_directory_is_removed_and_copied(tried: Tried) -> None:
    os.rename("old", "new")
    shutil.copytree("new", "copy")
    shutil.rmtree("new")
    assert not os.path.exists("new") and contents(Path("copy")) == {"x": "x", "deep/y": "y"}
    os.rename("copy", "old")
    assert contents(Path("old")) == {"x": "x", "deep/y": "y"}


def test_files_are_renamed_and_linked(tried: Tried) -> None:
    Path("part").write_text("whole")
    os.replace(src="part", dst="a.bin")
    assert Path("a.bin").read_text() == "whole" and not Path("part").exists()
    os.rename(src="b.bin", dst="c.bin")
    assert Path("c.bin").read_text() == "b" and not Path("b.bin").exists()
    os.link("kept.txt", "second")
    Path("second").open("a").close()
    with Path("second").open("a") as file:
        file.write("!")
    assert Path("second").read_text() == "kept!"
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("from elsewhere")
    shutil.move(file.name, "moved")
    assert Path("moved").read_text() == "from elsewhere" and not os.path.exists(file.name)
    shutil.move("moved", tempfile.gettempdir())
    assert Path(tempfile.gettempdir(), "moved").read_text() == "from elsewhere"
    shutil.move("kept.txt", tempfile.gettempdir())
    assert Path(tempfile.gettempdir(), "kept.txt").read_text() == "kept" and not Path("kept.txt").exists()


def test_copies_keep_what_belongs_to_a_file(tried: Tried) -> None:
    os.makedirs("out/deep")
    Path("out/run.sh").write_text("true")
    os.chmod("out/run.sh", 0o751)
    os.symlink("run.sh", "out/link")
    shutil.copy2("out/run.sh", "copy.sh")
    assert os.stat("copy.sh").st_mode & 0o777 == 0o751
    shutil.copytree("out", "out2", symlinks=True)
    assert os.readlink("out2/link") == "run.sh" and Path("out2/link").read_text() == "true"
    assert os.path.isdir("out2/deep") and os.stat("out2/run.sh").st_mode & 0o777 == 0o751
    shutil.copytree("old", "out", dirs_exist_ok=True)
    assert Path("out/deep/y").read_text() == "y"
    os.utime(path="out/run.sh", times=(1, 2))
    assert os.stat("out/run.sh").st_mtime == 2 and shutil.disk_usage("out").total > 0
    shutil.make_archive("all", "tar", "out")
    with tarfile.open("all.tar") as archive:
        assert {"./run.sh", "./deep/y"} <= set(archive.getnames())
        archive.extractall("unpacked", filter="data") if sys.version_info >= (3, 12) else archive.extractall("unpacked")
    assert Path("unpacked/deep/y").read_text() == "y"
    os.chmod("a.bin", 0o600), os.utime("a.bin", (1, 1))
    assert os.stat("a.bin").st_mtime != 1, "what is known about a file of the world stays"


def test_links_of_both_layers_are_followed(tried: Tried) -> None:
    os.makedirs("steps/1")
    os.symlink("steps/1", "latest")
    Path("latest/weights").write_text("1")
    assert Path("steps/1/weights").read_text() == "1"
    assert os.path.realpath("latest/weights") == str(tried.world / "steps/1/weights")
    assert os.path.islink("latest") and Path("latest").resolve() == tried.world / "steps" / "1"
    os.symlink(tried.world / "old", "other")
    Path("other/x").write_text("by link")
    assert Path("old/x").read_text() == "by link" and os.listdir("other/deep") == ["y"]
    assert Path("other/../kept.txt").read_text() == "kept"
    os.remove("other")
    assert Path("old/x").read_text() == "by link"
    os.symlink("loop", "loop")
    with pytest.raises(OSError, match="symbolic links"):
        Path("loop").write_text("x")
    os.symlink("nowhere", "dangling")
    Path("dangling").write_text("there")
    assert Path("nowhere").read_text() == "there"


def test_the_current_directory_may_be_a_new_one(tried: Tried) -> None:
    os.makedirs("out/deep")
    os.chdir("out")
    assert os.getcwd() == str(tried.world / "out") == str(Path.cwd()) and os.getcwdb() == os.fsencode(os.getcwd())
    Path("log").write_text("here")
    assert contents(tried.world / "out") == {"log": "here"} and sorted(os.listdir()) == ["deep", "log"]
    assert Path("../kept.txt").read_text() == "kept" and os.path.abspath("..") == str(tried.world)
    os.chdir(path="deep")
    Path("../../old/new").write_text("new")
    os.chdir("../../old")
    assert sorted(os.listdir()) == ["deep", "new", "x"]


def test_descriptors_of_directories(tried: Tried) -> None:
    os.mkdir("out")
    folder = os.open("out", os.O_RDONLY)
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.mkdir("deep", dir_fd=folder)
    assert sorted(os.listdir(folder)) == ["deep", "x"] and os.stat("x", dir_fd=folder).st_size == 0
    os.unlink("x", dir_fd=folder)
    os.rename("deep", "deeper", src_dir_fd=folder, dst_dir_fd=folder)
    assert [entry.name for entry in os.scandir(folder)] == ["deeper"]
    os.close(folder)


def test_open_files_and_names_that_were_handed_out(tried: Tried) -> None:
    with open("c.bin", "w") as file:
        file.write("c")
    assert Path(file.name).read_text() == "c" and os.path.samefile(file.name, "c.bin")
    os.replace(file.name, "d.bin")
    assert Path("d.bin").read_text() == "c"
    with tarfile.open("x.tar", "w") as archive:
        archive.add("old")
    with bz2.open("x.bz2", "w") as packed:
        packed.write(b"x")
    assert os.path.exists("x.tar") and bz2.decompress(Path("x.bz2").read_bytes()) == b"x"
    removed_by_another_name("a.bin")
    assert not os.path.exists("a.bin")
    torch.save({"a": 1}, "z.pt"), np.save("z.npy", np.ones(2))
    assert torch.load("z.pt", weights_only=True) == {"a": 1} and np.load("z.npy", mmap_mode="r+").sum() == 2
    assert pickle.loads(pickle.dumps(os.remove)) is os.remove


def test_shared_memory_by_file_name_is_of_the_world(tried: Tried) -> None:
    name = f"/dev/shm/keepstep-test-{os.getpid()}"
    Path(name).write_text("x")
    assert Path(name).read_text() == "x"
    tried.scratch.leave()
    assert not os.path.exists(name)
    with open(os.devnull, "w") as file:
        file.write("x")


def test_no_room_is_told_and_leaves_nothing(tried: Tried, tmp_path: Path) -> None:
    tried.scratch.leave()
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free)
    tried.scratch.enter()
    with pytest.raises(OSError, match="No space"):
        (tmp_path / "huge").open("r+")
    assert os.stat(tmp_path / "huge").st_size > 0
    (tmp_path / "huge").open("w").close()
    assert os.stat(tmp_path / "huge").st_size == 0


def test_calls_that_were_kept_reach_the_world_again(tried: Tried, tmp_path: Path) -> None:
    """A module that is imported in a rehearsal keeps what it imported: `from io import open`."""
    (tmp_path / "late.py").write_text("from io import open\nfrom os import remove, listdir\n")
    names: dict[str, object] = {}
    exec((tmp_path / "late.py").read_text(), names)
    with names["open"](tmp_path / "inside", "w") as file:
        file.write("x")
    tried.scratch.leave()
    assert not (tmp_path / "inside").exists()
    with names["open"](tmp_path / "after", "w") as file:
        file.write("x")
    assert "after" in names["listdir"](tmp_path)
    tried.scratch.enter()
    with names["open"](tmp_path / "again", "w") as file:
        file.write("x")
    tried.scratch.leave()
    assert not (tmp_path / "again").exists(), "in the next one they stand in again"
    names["remove"](tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = {name: getattr(os, name) for name in dir(os)}
    others = io.open, open, tarfile.bltn_open, torch._C.PyTorchFileWriter, tempfile.tempdir, os.environ.get("TMPDIR")
    abilities = [set(one) for one in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)]
    scratch = ScratchFiles(tmp_path)
    scratch.enter()
    assert os.stat is not before["stat"] and io.open is open is tarfile.bltn_open is not others[0]
    scratch.leave()
    assert {name: getattr(os, name) for name in dir(os)} == before
    assert others == (
        io.open,
        open,
        tarfile.bltn_open,
        torch._C.PyTorchFileWriter,
        tempfile.tempdir,
        os.environ.get("TMPDIR"),
    )
    assert abilities == [set(one) for one in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)]


def test_the_scratch_directory_is_removed_while_it_is_in_use(tried: Tried, tmp_path: Path) -> None:
    Path("a.bin").write_text("new")
    remove_scratch(str(tmp_path / "scratch"))
    tried.scratch.leave()
    assert not (tmp_path / "scratch").exists()


def test_what_is_written_while_it_is_removed_keeps_nothing_of_it(
    tried: Tried, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.bin").write_text("new")
    refused, rmdir = [], REAL.rmdir

    def one_more_then(directory: str) -> None:
        """As if another thread wrote just before."""
        try:
            Path(f"late{len(refused)}.bin").write_text("new")
        except FileNotFoundError:
            refused.append(directory)
        rmdir(directory)

    monkeypatch.setattr(REAL, "rmdir", one_more_then)
    remove_scratch(str(tmp_path / "scratch"))
    tried.scratch.leave()
    assert refused and not list(tmp_path.glob("scratch*")) and not list(tmp_path.rglob("late*"))
