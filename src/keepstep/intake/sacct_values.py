"""Single values as sacct writes them: states, exit codes, durations, TRES, job ids."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

__all__ = [
    "STATES",
    "JobName",
    "duration_us",
    "exit_of",
    "gpus_of",
    "group_of",
    "job_name_of",
    "looks_right",
    "number_of",
    "state_of",
]

STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "COMPLETING",
        "CONFIGURING",
        "DEADLINE",
        "EXPEDITING",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PENDING",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "RESV_DEL_HOLD",
        "REVOKED",
        "RUNNING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "TIMEOUT",
    }
)
"""Base states and flags of Slurm's jobs."""

_SHORT = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "TO": "TIMEOUT",
}
_CANCELLED = re.compile(r"CANCELLED\+?(?: by (\S+))?\Z")
_EXIT = re.compile(r"(\d{1,10}):(\d{1,5})\Z", re.ASCII)
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.(\d{1,6}))?\Z", re.ASCII)
_JOB = re.compile(r"(\d+)(?:_(\d+|\[[^\]]*\]))?(?:\+(\d+))?(?:\.(.+))?\Z", re.ASCII | re.DOTALL)
_GPU = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d{1,12})([KM]?)(?=,|\Z)", re.ASCII)
_UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}
_PLAIN = frozenset({"", "UNLIMITED", "Partition_Limit", "INVALID", "Unknown", "None", "NONE", "N/A"})
_WORD = re.compile(r"[\w.@$+,/\\ -]*\Z")
_MOST = 2**62


class JobName(msgspec.Struct, frozen=True):
    """The parts of a job id: 1234_5+1.batch has number 1234, task 5, offset 1 and step `batch`."""

    number: int
    task: int | None = None
    offset: int | None = None
    step: str = ""
    pending_tasks: str = ""


def state_of(text: str) -> tuple[str, str] | None:
    """(state, who cancelled it) of a state as printed, also cut short (`CANCELLED+`, `OUT_OF_ME+`); None: no state."""
    if match := _CANCELLED.match(text):
        return "CANCELLED", match[1] or ""
    word = text.upper()
    if word.endswith("+"):
        whole = [state for state in STATES if state.startswith(word[:-1])] if len(word) > 3 else []
        return (whole[0], "") if len(whole) == 1 else None
    word = _SHORT.get(word, word)
    return (word, "") if word in STATES else None


def exit_of(text: str) -> tuple[int, int] | None:
    """(code, signal) of `13:0`; None where it is not written so."""
    match = _EXIT.match(text)
    return (int(match[1]), int(match[2])) if match and int(match[1]) < 2**31 else None


def duration_us(text: str) -> int | None:
    """Microseconds of `[D-]HH:MM:SS`, `MM:SS` or `MM:SS.mmm`; None where it is not written so."""
    match = _DURATION.match(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:4])
    micros = int((match[5] or "").ljust(6, "0"))
    value = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
    return value if value < _MOST else None


def number_of(text: str) -> int | None:
    """A whole number that is not negative; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def gpus_of(tres: str) -> int | None:
    """GPUs in a TRES list; 0 where there are other resources but no GPU; None where the list is empty.

    `gres/gpu=8` counts all; kinds (`gres/gpu:h100=8`) are added up only where that is not there.
    """
    if not tres or "=" not in tres:
        return None
    whole = kinds = 0
    named = False
    for kind, digits, unit in _GPU.findall(tres):
        count = int(digits) * _UNITS[unit]
        if kind:
            kinds += count
        else:
            whole, named = whole + count, True
    return whole if named else kinds


def job_name_of(text: str) -> JobName | None:
    """The parts of a job id; None where it is none."""
    match = _JOB.match(text)
    if match is None or len(match[1]) > 18:
        return None
    task = match[2]
    listed = task is not None and task.startswith("[")
    return JobName(
        number=int(match[1]),
        task=int(task) if task and not listed and len(task) < 18 else None,
        offset=int(match[3]) if match[3] and len(match[3]) < 9 else None,
        step=match[4] or "",
        pending_tasks=task if listed and task else "",
    )


def group_of(comment: str) -> str:
    """The group a user gave the job: `run` (or `experiment`, `group`) in a comment that is JSON; else empty."""
    if not comment.lstrip().startswith("{"):
        return ""
    try:
        fields = msgspec.json.decode(comment)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    if not isinstance(fields, Mapping):
        return ""
    return next((str(fields[key])[:200] for key in ("run", "experiment", "group") if fields.get(key)), "")


def looks_right(column: str, value: str) -> bool:
    """Whether `value` can stand in `column` (lower case); True for columns of free text and those not known here."""
    value = value.strip()
    if column == "state":
        return state_of(value) is not None
    if column in ("jobid", "jobidraw"):
        return job_name_of(value) is not None
    if column in ("user", "account", "partition", "qos", "cluster"):
        return bool(_WORD.match(value))
    if column in ("exitcode", "derivedexitcode"):
        return value == "" or exit_of(value) is not None
    if column in ("submit", "eligible", "start", "end"):
        return value in _PLAIN or bool(re.match(r"\d{4}-\d\d-\d\d[T ]|\d{6,11}\Z", value, re.ASCII))
    if column in ("elapsedraw", "nnodes", "ncpus", "timelimitraw", "priority", "restarts", "uid", "gid", "cputimeraw"):
        return value in _PLAIN or number_of(value) is not None
    if column in ("elapsed", "timelimit", "suspended", "reserved", "planned"):
        return value in _PLAIN or value.startswith("-") or duration_us(value) is not None
    if column in ("alloctres", "reqtres"):
        return value == "" or "=" in value
    return True
