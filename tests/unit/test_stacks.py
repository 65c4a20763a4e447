"""Stacks of real processes and of text; counters of the kernel."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.service import stacks
from keepstep.service.counters import host_counters, host_sample, process_counters
from keepstep.service.stacks import parse_faulthandler, spy_stack, take_stack

PROGRAM = """
import sys, threading
def stand_here():
    print("ready", flush=True)
    sys.stdin.readline()
stand_here()
"""
ANSWERING = "import faulthandler; faulthandler.register(39, all_threads=True)\n" + PROGRAM


def standing(program: str, stderr: object = subprocess.DEVNULL) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_py_spy_sees_where_a_process_stands() -> None:
    with standing(PROGRAM) as child:
        stack = spy_stack(child.pid)
        assert "stand_here" in [frame.function for frame in stack.main], stack.how
        assert "stand_here" in stack.text() and f"Process {child.pid}" in stack.text()
        child.communicate("\n")
    assert spy_stack(child.pid).threads == ()


def test_without_py_spy_the_process_answers_a_signal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)
    log = tmp_path / "m0.log"
    with log.open("w") as file, standing(ANSWERING, file) as child:
        stack = take_stack(child.pid, log)
        assert stack.how == "faulthandler" and "stand_here" in [frame.function for frame in stack.main]
        assert child.poll() is None
        child.communicate("\n")


def test_a_process_that_does_not_expect_the_signal_does_not_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)
    (tmp_path / "log").write_text("")
    with standing(PROGRAM) as child:
        stack = take_stack(child.pid, tmp_path / "log")
        assert stack.threads == () and "not installed" in stack.how
        assert child.poll() is None
        child.communicate("\n")


def test_what_faulthandler_writes_is_read_back() -> None:
    ready, done = threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile("w+") as file:
        file.write("some line of the script\n")
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stack = parse_faulthandler(1, file.read() + "and more of it\n")
    done.set()
    thread.join()
    assert len(stack.threads) >= 2
    assert stack.main[0].function == "test_what_faulthandler_writes_is_read_back"


@given(st.text())
def test_any_text_is_parsed_without_a_word(text: str) -> None:
    assert parse_faulthandler(1, text).pid == 1


def test_counters_of_a_process_grow() -> None:
    before = process_counters(os.getpid())
    sum(range(3_000_000))
    after = process_counters(os.getpid())
    assert before is not None and after is not None
    assert after.cpu_s > before.cpu_s and after.threads >= 1 and after.state in "RS"
    assert host_sample(os.getpid(), stack=7).stack == 7


def test_a_process_that_is_gone_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert process_counters(child.pid) is None and host_sample(child.pid).state == "X"


def test_counters_of_the_host() -> None:
    host = host_counters()
    assert host.processors >= 1 and host.cpu_s["idle"] > 0 and host.memory_available > 0 and "lo" in host.interfaces
