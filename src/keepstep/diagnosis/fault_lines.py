"""What single lines of a log say about the cause of a fault, and which errors only pass on what others caused."""

from __future__ import annotations

import re

from keepstep.diagnosis.fault_machine import MACHINE_LINES
from keepstep.diagnosis.fault_meaning import FaultLine
from keepstep.diagnosis.fault_program import PROGRAM_LINES
from keepstep.records.evidence import LogEvent

__all__ = ["is_consequence", "meaning_of"]

_BY_EVENT: dict[str, list[FaultLine]] = {}
for _line in (*MACHINE_LINES, *PROGRAM_LINES):
    _BY_EVENT.setdefault(_line.event, []).append(_line)

_CONSEQUENCES = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|ChildFailedError|ProcessExitedException"
    r"|ProcessRaisedException|SystemExit"
    r"|KeyboardInterrupt|SignalException|RayTaskError|RayActorError|WorkerCrashedError"
    r"|EngineDeadError|CalledProcessError"
    r"|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|EOFError"
    r"|RendezvousTimeoutError"
)
_CONSEQUENT_WORDS = re.compile(
    r"NCCL|gloo|c10d|ProcessGroup|watchdog|collective|Connection (?:closed|reset|refused)"
    r"|timed? ?out|monitoredBarrier|Socket|store|peer"
    r"|out of memory|ECC|No space left|shared memory|DataLoader worker|CUDA error|cudaError|CUDNN"
    r"|quota|file handle|device ordinal|No (?:CUDA|HIP) GPUs|no NVIDIA driver"
    r"|Deserializ|StreamReader|central directory|unexpected EOF|same model across"
    r"|in this process with sizes|finished reduction|mismatch between"
    r"|Address already in use|undefined symbol|shared object",
    re.IGNORECASE,
)


def meaning_of(event: LogEvent) -> FaultLine | None:
    """The first line of the table that fits the event; None if it says nothing about a fault."""
    return next((line for line in _BY_EVENT.get(event.kind, ()) if line.when is None or line.when(event)), None)


def is_consequence(event: LogEvent) -> bool:
    """Whether an exception only passes on what other events of the table already say, or what a peer's end caused."""
    if event.kind != "exception":
        return False
    if event.fields.get("type", "").rsplit(".", 1)[-1].endswith("Exit"):
        return True
    return bool(
        _CONSEQUENCES.search(event.fields.get("type", "")) or _CONSEQUENT_WORDS.search(event.fields.get("message", ""))
    )
