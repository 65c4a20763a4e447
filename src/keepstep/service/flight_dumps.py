"""Flight Recorder dumps of jobs that know nothing of keepstep: switched on by the environment, asked for by pipe.

Source: PyTorch documentation, "Flight Recorder for Debugging Stuck Jobs" (variables), and ProcessGroupNCCL.cpp: its
monitor thread opens `<prefix><rank>.pipe` and dumps to `<prefix><rank>` when something is written into it. Gloo dumps
nothing.
"""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["DUMPS_FOLDER", "ask_for_dump", "dump_environment", "dump_of"]

DUMPS_FOLDER = "dumps"
_PREFIX = "flight_"
_PIPE_PREFIX = "pipe_"
_ENTRIES = "2000"
_MOST_BYTES = 32 << 20
_NEW_NAME = (2, 7)


def dump_environment(run: Path) -> dict[str, str]:
    """Variables that let a process keep its newest collectives and dump them under `run`; they change nothing else."""
    folder = run.absolute() / DUMPS_FOLDER
    return {
        "TORCH_FR_BUFFER_SIZE": _ENTRIES,
        **({"TORCH_NCCL_TRACE_BUFFER_SIZE": _ENTRIES} if _knows_only_the_old_name() else {}),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / _PREFIX),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / _PREFIX),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / _PIPE_PREFIX),
    }


def _knows_only_the_old_name() -> bool:
    """Whether the installed torch is older than `TORCH_FR_BUFFER_SIZE`; newer ones warn of the old name."""
    try:
        major, minor = version("torch").split(".")[:2]
        return (int(major), int(minor)) < _NEW_NAME
    except (PackageNotFoundError, ValueError):
        return False


def ask_for_dump(run: Path, rank: int) -> bool:
    """Ask the process of `rank` for a dump; False where it has no pipe or does not listen."""
    pipe = run / DUMPS_FOLDER / f"{_PIPE_PREFIX}{rank}.pipe"
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
        return True
    return False


def dump_of(run: Path, rank: int) -> bytes:
    """The newest dump of `rank`; empty if there is none or it is too large to hand over."""
    path = run / DUMPS_FOLDER / f"{_PREFIX}{rank}"
    with contextlib.suppress(OSError):
        if path.stat().st_size <= _MOST_BYTES:
            return path.read_bytes()
    return b""
