"""What a rehearsal writes stays in its sandbox, and the process is as it was before."""

from __future__ import annotations

import atexit
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from keepstep.training.held_back import HeldBack
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
    with HeldBack():
        os.remove(tmp_path / "folder" / "x")
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        os.truncate(tmp_path / "folder" / "x", 0)
    assert files(tmp_path) == {"folder/x": "x"}


def test_what_a_compiler_puts_down_for_a_moment_is_removed() -> None:
    """A failure that a real rehearsal with inductor had: its temporary folders could not be emptied."""
    with HeldBack(), tempfile.TemporaryDirectory() as name:
        Path(name, "x").write_text("x")
    assert not Path(name).exists()


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
