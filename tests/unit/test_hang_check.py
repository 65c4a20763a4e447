"""Two looks at a process: what is hard evidence of a hang, and what is not."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from keepstep.service.hang_check import Look, compared
from keepstep.service.plain_eyes import plain_place
from keepstep.service.stack_words import digest_of, own_line, place_words, stands_at_a_lock, waits_for_work
from keepstep.service.stacks import Stack, StackFrame, ThreadStack

UPLOADS = (StackFrame("_try_wait", "/usr/lib/python3.11/subprocess.py", 1904), StackFrame("save", "/u/train.py", 8))
SLEEPS = (StackFrame("stand_still", "/u/train.py", 12), StackFrame("<module>", "/u/train.py", 40))
STILL = Look("S", SLEEPS, "py-spy", 10.0, 500, False)


def change(**fields: object) -> Look:
    return msgspec.structs.replace(STILL, **fields)


def test_nothing_moved_is_hard_evidence() -> None:
    assert compared(STILL, change(cpu_s=10.01), apart_s=1.0, alone=True) == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (change(head=501), "its recorder moved"),
        (change(in_collective=True), "waits for others"),
        (change(frames=SLEEPS[1:]), "its stack moved"),
        (change(cpu_s=10.5), "0.5 s of processor time"),
        (change(frames=(), how="py-spy is not installed"), "py-spy is not installed"),
        (change(state=""), "gone"),
        (change(state="Z"), "gone"),
    ],
)
def test_anything_that_moves_denies_it(second: Look, why: str) -> None:
    assert why in compared(STILL, second, apart_s=1.0, alone=True)


def test_who_waits_for_a_process_it_started_is_at_work() -> None:
    """An upload or an evaluator: whoever is replaced then loses what it was about to write."""
    look = change(frames=UPLOADS)
    assert "waits for a process that it started" in compared(look, look, apart_s=1.0, alone=True)


def test_a_stopped_process_needs_no_stack() -> None:
    stopped = change(state="T", frames=(), how="py-spy failed")
    assert compared(stopped, stopped, apart_s=1.0, alone=True) == ""


def test_a_lock_of_the_script_denies_a_swap_but_not_a_restart_of_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n")
    look = change(frames=(StackFrame("<module>", str(script), 4),))
    assert "stands at a lock" in compared(look, look, apart_s=1.0, alone=True)
    assert compared(look, look, apart_s=1.0, alone=False) == ""


@pytest.mark.parametrize(
    "line", ["with self.mutex:", "with guards[rank]:", "fcntl.flock(file, fcntl.LOCK_EX)", "item = ready.get()"]
)
def test_other_locks_of_a_script(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n")
    assert stands_at_a_lock((StackFrame("step", str(tmp_path / "train.py"), 1),))


@pytest.mark.parametrize("line", ["with torch.no_grad():", "time.sleep(options.get('pause', 600))", "read(handle)"])
def test_lines_that_are_no_locks(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n")
    assert not stands_at_a_lock((StackFrame("step", str(tmp_path / "train.py"), 1),))


@pytest.mark.parametrize("alone", [True, False])
def test_a_collective_of_another_backend_denies_it(alone: bool) -> None:
    """G-20: the recorder does not know of it, and a new member would call it, too."""
    frames = (
        StackFrame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py", 4800),
        StackFrame("wrapper", "/x/site-packages/torch/distributed/c10d_logger.py", 81),
        StackFrame("<module>", "/u/train.py", 40),
    )
    look = change(frames=frames)
    assert "waits for others in a collective, by its stack" in compared(look, look, apart_s=1.0, alone=alone)
    frozen = change(frames=frames, state="T")
    assert compared(frozen, frozen, apart_s=1.0, alone=alone) == ""


def test_a_script_that_waits_for_a_collective_of_its_own_stands_at_no_lock(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("work.wait()\n")
    mine = StackFrame("step", str(tmp_path / "train.py"), 1)
    assert waits_for_work((mine,)) and not stands_at_a_lock((mine,))
    assert "collective" in compared(change(frames=(mine,)), change(frames=(mine,)), apart_s=1.0, alone=False)
    assert plain_place(Stack(1, "py-spy", (ThreadStack("MainThread", False, (mine,)),))) == "collective"
    inner = (StackFrame("wait", threading.__file__, threading.Event.wait.__code__.co_firstlineno), mine)
    assert not waits_for_work(inner)


def test_a_loader_that_waits_for_its_workers_stands_at_no_lock() -> None:
    frames = (
        StackFrame("wait", "/usr/lib/python3.11/threading.py", 320),
        StackFrame("get", "/usr/lib/python3.11/queue.py", 171),
        StackFrame("_try_get_data", "/x/site-packages/torch/utils/data/dataloader.py", 1200),
        StackFrame("<module>", "/u/train.py", 40),
    )
    assert not stands_at_a_lock(frames)


def test_a_place_in_words_names_the_call_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f():\n    get_stuck()\n")
    frames = (
        StackFrame("sleep", "/x/site-packages/lib.py", 3),
        StackFrame("f", str(script), 2),
    )
    assert own_line(frames) == f"f ({script}:2): get_stuck()"
    assert place_words(frames).endswith(f"called from f ({script}:2): get_stuck()")
    assert place_words(()) == "an unknown place"


def test_a_digest_tells_places_apart_and_fits_into_63_bits() -> None:
    assert digest_of(()) == 0
    assert digest_of(SLEEPS) == digest_of(SLEEPS) != digest_of(SLEEPS[1:])
    assert 0 < digest_of(SLEEPS) < 1 << 63
