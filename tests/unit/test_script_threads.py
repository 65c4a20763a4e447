"""No thread of the script is at work when its rehearsal is over; what only waits, and what libraries run, may stay."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepstep.training.script_threads import ScriptThreads


def test_a_thread_that_comes_to_its_end_is_waited_for() -> None:
    go = threading.Event()
    with ScriptThreads() as threads:
        saver = threading.Thread(target=go.wait, args=(300.0,), name="saver")
        saver.start()
        assert threads.at_work() == [saver]
    threading.Thread(target=go.set).start()
    assert threads.wait(600) == [] and not saver.is_alive()


def test_one_that_goes_on_is_named() -> None:
    end = threading.Event()

    def beat() -> None:
        while not end.wait(0.01):
            pass

    with ScriptThreads() as threads:
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    assert threads.wait(1) == ["heartbeat"]
    end.set()
    assert threads.wait(600) == []


def test_one_that_only_waits_may_stay_if_it_keeps_no_process_from_its_end() -> None:
    work: queue.Queue[object] = queue.Queue()
    with ScriptThreads() as threads:
        threading.Thread(target=work.get, name="daemon", daemon=True).start()
        other = threading.Thread(target=work.get, name="other", daemon=False)
        other.start()
    assert threads.wait(1) == ["other"]
    work.put(None), work.put(None)
    assert threads.wait(600) == []


def test_a_pool_is_at_work_as_long_as_it_has_a_job() -> None:
    began, go = threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        go.wait(300.0)

    with ScriptThreads() as threads, ThreadPoolExecutor(1) as executor:
        saved = executor.submit(job)
        began.wait()
        assert len(threads.wait(1)) == 1
        go.set()
        saved.result()
        assert threads.wait(600) == [], "an idle worker is none"


def test_older_threads_are_none_of_it() -> None:
    go = threading.Event()
    older = threading.Thread(target=go.wait, args=(300.0,))
    older.start()
    with ScriptThreads() as threads:
        assert threads.wait(1) == []
    go.set()
    older.join()
    assert threading.Thread.start.__qualname__ == "Thread.start"


STANDBY = """
import sys, threading
from pathlib import Path
from keepstep.records.sandbox_messages import RoleKind
from keepstep.training import sandbox
from keepstep.training.replay import Replay
sandbox._PATIENCE_TICKS = 2
rehearsal = sandbox.Sandbox(RoleKind("k", 0, (0,)), 1, replay=Replay(), wanted=lambda: False)
rehearsal.open()
def beat(end=threading.Event()):
    while not end.wait(0.01):
        Path(sys.argv[1], "beat").write_text("of the rehearsal")
threading.Thread(target=beat, name="heartbeat", daemon=True).start()
rehearsal.close()
"""


def test_a_standby_ends_before_such_a_thread_reaches_the_world(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "standby.py").write_text(STANDBY)
    command = [sys.executable, str(tmp_path / "standby.py"), str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 75, done.stderr
    assert "(heartbeat)" in done.stderr and "makes room" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert not list(tmp_path.glob("keepstep-rehearsal-*/files/*")), "what it wrote is gone"
