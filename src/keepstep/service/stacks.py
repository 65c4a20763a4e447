"""Python stacks of running processes: py-spy from outside, else faulthandler inside by a signal that `join` prepared.

py-spy reads the memory of a process without stopping it, so that a frozen one can be read too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from keepstep.records.watch_messages import STACK_SIGNAL

__all__ = ["Stack", "StackFrame", "ThreadStack", "parse_faulthandler", "spy_stack", "take_stack"]

_LIMIT_S = 10.0
_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100
_ANSWER_LOOKS, _ANSWER_EVERY_S = 20, 0.05
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackFrame(msgspec.Struct, frozen=True):
    """One call: function, file, line."""

    function: str
    file: str
    line: int


class ThreadStack(msgspec.Struct, frozen=True):
    """One thread, innermost frame first. `active` says that it was running."""

    name: str
    active: bool
    frames: tuple[StackFrame, ...]


class Stack(msgspec.Struct, frozen=True):
    """What one process was doing. No `threads`: it cannot be known; `how` says by which means or why not."""

    pid: int
    how: str
    threads: tuple[ThreadStack, ...] = ()

    @property
    def main(self) -> tuple[StackFrame, ...]:
        """The frames of the main thread, innermost first."""
        named = (thread for thread in self.threads if thread.name == "MainThread")
        return next(named, self.threads[-1] if self.threads else ThreadStack("", False, ())).frames

    def text(self) -> str:
        """As `py-spy dump` prints it."""
        lines = [f"Process {self.pid}: ({self.how})"]
        for thread in self.threads:
            lines.append(f'Thread {self.pid} ({"active" if thread.active else "idle"}): "{thread.name}"')
            lines += [f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames]
        return "\n".join(lines) + "\n"


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False


_threads = msgspec.json.Decoder(list[_SpyThread])


def spy_stack(pid: int) -> Stack:
    """The stacks of `pid` by py-spy, taken without stopping it."""
    program = _py_spy()
    if program is None:
        return Stack(pid, "py-spy is not installed")
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL, check=False)
        found = _threads.decode(done.stdout[:_MOST_BYTES]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError, msgspec.ValidationError) as error:
        return Stack(pid, f"py-spy failed: {type(error).__name__}")
    if found is None:
        return Stack(pid, f"py-spy failed: {_first_line(done.stderr)}")
    return Stack(pid, "py-spy", tuple(_thread(thread, pid) for thread in found))


def _thread(thread: _SpyThread, pid: int) -> ThreadStack:
    name = thread.thread_name or ("MainThread" if thread.os_thread_id == pid else f"thread {thread.os_thread_id}")
    frames = thread.frames[:_MOST_FRAMES]
    return ThreadStack(name, thread.active, tuple(StackFrame(f.name, f.filename, f.line) for f in frames))


def take_stack(pid: int, log: Path | None) -> Stack:
    """The stacks of `pid`: by py-spy, else by its own faulthandler, whose output lands in `log`. May take seconds."""
    stack = spy_stack(pid)
    if stack.threads or log is None or not _answers_signal(pid):
        return stack
    try:
        before = log.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        text = _grown(log, before)
    except OSError as error:
        return Stack(pid, f"{stack.how}; its log cannot be read: {error.strerror}")
    own = parse_faulthandler(pid, text)
    return own if own.threads else Stack(pid, f"{stack.how}; {own.how}")


def _grown(log: Path, before: int) -> str:
    """What was added to `log` since it had `before` bytes, once nothing more comes."""
    text = b""
    for _ in range(_ANSWER_LOOKS):
        time.sleep(_ANSWER_EVERY_S)
        with open(log, "rb") as file:
            file.seek(before)
            new = file.read(_MOST_BYTES)
        if new and new == text:
            break
        text = new
    return text.decode("utf-8", "replace")


def _first_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0][:200] if lines else "it said nothing"


def _py_spy() -> str | None:
    """The program that came with the package of this environment, else one on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _answers_signal(pid: int) -> bool:
    """Whether `pid` catches STACK_SIGNAL: to others it would be deadly."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)
    except (OSError, StopIteration, IndexError, ValueError):
        return False


def parse_faulthandler(pid: int, text: str) -> Stack:
    """The stacks in what faulthandler wrote into the middle of other output; its last dump counts."""
    threads: list[tuple[str, list[StackFrame]]] = []
    inside = False
    for line in text[-_MOST_BYTES:].splitlines():
        if found := _THREAD.match(line):
            threads.append((found[1], []))
            inside = True
        elif inside and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdigit() else 0
            if len(threads[-1][1]) < _MOST_FRAMES:
                threads[-1][1].append(StackFrame(frame[3], frame[1], number))
        elif line.strip():
            inside = False
    if not threads:
        return Stack(pid, "it did not answer the signal for its stacks")
    names = [*(f"thread {name}" for name, _ in threads[:-1]), "MainThread"]  # faulthandler lists the oldest thread last
    whole = zip(names, threads, strict=True)
    return Stack(pid, "faulthandler", tuple(ThreadStack(name, False, tuple(frames)) for name, (_, frames) in whole))
