"""Lines of launchers: torchrun's table of failures, srun, mpirun, DeepSpeed, Ray; and what their numbers mean."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.intake.log_lines import Line
from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["LAUNCHER_PATTERNS", "FailureTable", "ranks_in"]

_SIGNALS = {
    "-6": "SIGABRT",
    "-7": "SIGBUS",
    "-8": "SIGFPE",
    "-9": "SIGKILL",
    "-11": "SIGSEGV",
    "-15": "SIGTERM",
    "134": "SIGABRT",
    "137": "SIGKILL",
    "139": "SIGSEGV",
    "143": "SIGTERM",
}
_LONGEST_RANGE = 100_000


def ranks_in(text: str) -> list[int]:
    """The numbers of a list such as `0-3,7 and 9`; ranges are inclusive. Nonsense gives an empty list."""
    found: list[int] = []
    for first, last in re.findall(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", text):
        low, high = int(first), int(last or first)
        if high - low > _LONGEST_RANGE:
            return []
        found.extend(range(low, high + 1))
    return found


def _ended(_: str, fields: dict[str, str]) -> dict[str, str]:
    """Adds `signal` where the exit code is one."""
    code = fields.get("code", "")
    name = fields.get("signal") or _SIGNALS.get(code, "")
    return {key.removesuffix("_2"): value for key, value in fields.items()} | ({"signal": name} if name else {})


LAUNCHER_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "process_done",
        "code 0|code: 0|code=0|status 0|status: 0|status=0",
        expression=r"(?<!local )\b(?:rank|worker|trainer)\W{0,2}(?P<rank>\d{1,6})\b[^\n\d]{0,60}?"
        r"\b(?:exit(?:ed|s)?|ended|finished)\b[^\n\d]{0,30}\b(?:code|status)\W{0,3}0\b(?![.\d])",
    ),
    pattern(
        "process_ended",
        "exitcode|exit code|exited|killed|aborted|segmentation|terminated|out of memory|return code",
        expression=r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+) \(pid: (?P<victim>\d+)\)"
        r"|srun: error: (?P<host>[\w.\[\],-]+): tasks? (?P<ranks>[\d,\s-]+): (?P<how>[A-Z][\w -]*(?:\(core "
        r"dumped\))?[\w -]*?(?:code (?P<code_2>\d+))?)\s*$"
        r"|process rank (?P<ranks_2>\d+) with PID (?P<victim_2>\d+) on node (?P<host_2>[\w.-]+) exited on "
        r"signal (?P<number>\d+)(?: \((?P<how_2>[^)]*)\))?"
        r"|(?:pid|process) (?P<victim_4>\d+) (?:died|exited|terminated"
        r"|was killed)[^\n]{0,30}exit ?code:? (?P<code_4>-?\d+)"
        r"|(?:Process (?P<victim_3>\d+) )?exits with return code = (?P<code_3>-?\d+)"
        r"|Child process with PID (?P<victim_5>\d+) terminated with code (?P<code_5>-?\d+)",
        refine=lambda text, fields: _ended(
            text, {re.sub(r"_[2345]$", "", key): value for key, value in fields.items()}
        ),
    ),
    pattern(
        "first_failure",
        "first observed failure",
        expression=r"Root Cause \(first observed failure\):.*?rank\s*: (?P<rank>\d+) \(local_rank: "
        r"(?P<local_rank>\d+)\).*?exitcode\s*: (?P<code>-?\d+)",
        refine=_ended,
    ),
    pattern(
        "job_cancelled",
        "cancelled",
        expression=r"\*\*\* (?:JOB|STEP) \S+ ON (?P<host>\S+) CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+))?",
    ),
    pattern(
        "world",
        "world_size|world size|nranks|nnodes",
        expression=r"(?:world[_ ]?size|nranks)\W{1,3}(?P<world>\d{1,6})\b",
    ),
)


class FailureTable:
    """Follows torchrun's table, whose entries are several lines: `rank`, `exitcode`, `host`, root cause or not."""

    _ENTRY = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)*(time|host|rank|exitcode|error_file|traceback)\s*:\s(.*)$")

    def __init__(self) -> None:
        """No table has begun."""
        self._root = False
        self._inside = False
        self._fields: dict[str, str] = {}

    def heeds(self, text: str) -> bool:
        """Whether a line can belong to a table."""
        return "first observed failure" in text or "Failures:" in text or self._ENTRY.match(text) is not None

    def feed(self, line: Line) -> Iterator[tuple[str, dict[str, str]]]:
        """(kind, fields) of an entry that is complete with this line: `first_failure` or `process_ended`."""
        if "first observed failure" in line.text:
            self._inside = self._root = True
            self._fields = {}
        elif "Other Failures:" in line.text or line.text.rstrip().endswith("Failures:"):
            self._inside, self._root = True, False
            self._fields = {}
        entry = self._ENTRY.match(line.text) if self._inside else None
        if entry is None:
            return
        name, value = entry.groups()
        if name == "rank" and (numbers := re.match(r"(\d+) \(local_rank: (\d+)\)", value)):
            self._fields |= {"rank": numbers[1], "local_rank": numbers[2]}
        elif name == "host":
            self._fields["host"] = value.strip()
        elif name == "exitcode" and (code := re.match(r"(-?\d+)(?: \(pid: (\d+)\))?", value)):
            self._fields |= {"code": code[1]} | ({"victim": code[2]} if code[2] else {})
            if "rank" in self._fields:
                yield ("first_failure" if self._root else "process_ended"), _ended("", self._fields)
            self._fields = {}
