"""What a rehearsal writes stays in its sandbox, and the process is as it was before."""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import logging
import multiprocessing.resource_sharer
import multiprocessing.util
import os
import random
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.utils.data import DataLoader, TensorDataset

from keepstep.training.held_back import HeldBack, own_streams, silence
from keepstep.training.process_state import ProcessState
from keepstep.training.script import Script


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_written_in_a_rehearsal_are_read_back_there_and_gone_afterwards(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("old")
    with HeldBack():
        with kept.open("a") as file:
            file.write(" and new")
        assert kept.read_text() == "old and new"
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "x").write_text("x")
        assert (tmp_path / "folder" / "x").exists() and os.listdir(tmp_path / "folder") == ["x"]
        os.replace(tmp_path / "folder" / "x", tmp_path / "y")
        assert (tmp_path / "y").read_text() == "x"
        torch.save({"a": 1}, tmp_path / "z.pt")
        assert torch.load(tmp_path / "z.pt", weights_only=True) == {"a": 1}
        os.close(os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT))
    assert files(tmp_path) == {"kept.txt": "old"} and not (tmp_path / "folder").exists()
    (tmp_path / "after").write_text("1")
    assert (tmp_path / "after").read_text() == "1"


def test_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    (tmp_path / "folder" / "y").write_text("y")
    with HeldBack():
        os.truncate(tmp_path / "folder" / "y", 0)
        os.remove(tmp_path / "folder" / "x")
        assert not (tmp_path / "folder" / "x").exists()
        shutil.rmtree(tmp_path / "folder")
    assert files(tmp_path) == {"folder/x": "x", "folder/y": "y"}


def test_what_a_compiler_puts_down_for_a_moment_is_removed() -> None:
    """A failure that a real rehearsal with inductor had: its temporary folders could not be emptied."""
    with HeldBack(), tempfile.TemporaryDirectory() as name:
        Path(name, "x").write_text("x")
    assert not Path(name).exists()


def test_temporary_files_of_the_world_are_kept_from_a_rehearsal() -> None:
    """`--out $(mktemp -d)`, or shared memory: a real rank writes there too."""
    for place in (None, "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=place) as name:
            log = Path(name, "rank3.log")
            log.write_text("of the live rank")
            with HeldBack():
                log.write_text("of the rehearsal")
                torch.save({}, Path(name, "rank3.pt"))
                shutil.rmtree(Path(name))
            assert files(Path(name)) == {"rank3.log": "of the live rank"}


def test_caches_of_compilers_are_written_and_no_other_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = [Path(default_cache_dir()), tmp_path / "triton", tmp_path / "home" / ".triton"]
    assert own[0].parent == tmp_path
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    with HeldBack():
        for one in own:
            (one / "locks").mkdir(parents=True)
            (one / "locks" / "x").write_text("x")
        (tmp_path / "home" / ".cache" / "y").write_text("y")
        assert cache_dir() == str(own[0])
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "said"))
        (tmp_path / "said").mkdir()
    assert all((one / "locks" / "x").exists() for one in own) and (tmp_path / "said").exists()
    assert list((tmp_path / "home" / ".cache").iterdir()) == []


def test_temporary_files_work_however_a_script_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with HeldBack():
        inside = tempfile.gettempdir()
        tempfile.tempdir = None
        assert tempfile.gettempdir() == inside == os.environ["TMPDIR"]
        with tempfile.NamedTemporaryFile(dir=inside) as file:
            file.write(b"x")
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before and not os.path.exists(inside)


def test_tensors_are_shared_with_workers_in_a_rehearsal_and_after_it() -> None:
    """The sockets for that lie in a temporary directory that a process keeps for good."""
    data = TensorDataset(torch.arange(4.0))
    with HeldBack():
        assert [float(x) for (x,) in DataLoader(data, num_workers=1)] == [0.0, 1.0, 2.0, 3.0]
        shared = multiprocessing.resource_sharer.DupFd(0)
        made = multiprocessing.util.get_temp_dir()
    assert not os.path.exists(made) and multiprocessing.util.get_temp_dir() != made
    assert os.path.isdir(multiprocessing.util.get_temp_dir()) and shared is not None
    assert [float(x) for (x,) in DataLoader(data, num_workers=1)] == [0.0, 1.0, 2.0, 3.0]
    os.close(multiprocessing.resource_sharer.DupFd(0).detach())


def test_scratch_directories_of_killed_standbys_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("old", "young", "held"):
        (tmp_path / f"keepstep-rehearsal-{name}" / "files").mkdir(parents=True)
        if name != "young":
            os.utime(tmp_path / f"keepstep-rehearsal-{name}", (1, 1))
    held = os.open(tmp_path / "keepstep-rehearsal-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with HeldBack():
        pass
    assert sorted(one.name for one in tmp_path.glob("keepstep-rehearsal-*")) == [
        "keepstep-rehearsal-held",
        "keepstep-rehearsal-young",
    ]
    os.close(held)


def test_streams_and_hooks_that_a_script_sets_do_not_last(capfd: pytest.CaptureFixture[str]) -> None:
    state = ProcessState()
    before = sys.stdout, sys.stderr, sys.excepthook, threading.excepthook
    with silence(), own_streams():
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
        sys.stdout.write("dropped\n")
        sys.stderr.close()
        sys.excepthook = threading.excepthook = lambda *_: None
    gc.collect()
    state.restore()
    assert (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook) == before
    sys.stdout.write("heard\n"), sys.stderr.write("too\n")
    sys.stdout.flush(), sys.stderr.flush()
    assert capfd.readouterr() == ("heard\n", "too\n")


def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    """Random numbers, switches, environment, handlers, hooks, filters: everything a script may set."""
    before = torch.get_rng_state(), random.getstate(), dict(os.environ), list(sys.path), os.getcwd()
    state = ProcessState()
    logging.getLogger().addHandler(handler := logging.StreamHandler())
    torch.manual_seed(9), random.seed(9)
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "3"
    sys.path.insert(0, "elsewhere")
    os.chdir(tmp_path)
    warnings.simplefilter("ignore")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    state.restore()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert set(os.environ.items()) == set(before[2].items())
    assert (list(sys.path), os.getcwd()) == before[3:]
    assert torch.get_default_dtype() is torch.float32 and handler not in logging.getLogger().handlers
    assert hook.id not in torch.nn.modules.module._global_forward_hooks
    assert atexit.register is not None


SCRIPT = """
import torch
class Net(torch.nn.Module):
    made = 0
    def __init__(self):
        super().__init__()
        Net.made += 1
class Plain:
    pass
seen = globals().get("seen", 0) + 1
Net.extra = Net()
results.append((Net, Net.forward.__code__, Net.made, Plain, seen))
"""


def test_a_script_run_again_has_the_same_code_and_nothing_else_of_the_first_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    path = tmp_path / "script.py"
    path.write_text(f"import collected; results = collected.results\n{SCRIPT}")
    (tmp_path / "collected.py").write_text("results = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    script = Script(str(path))
    script.run()
    script.run()
    first, second = sys.modules.pop("collected").results
    assert first[0] is second[0], "compiled code asks for the very class"
    assert first[1] is second[1] and first[2:3] == second[2:3] == (1,)
    assert first[3] is not second[3] and second[4] == 1
