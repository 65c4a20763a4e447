"""Results of health checks: DCGM diagnostics (versions 3 and 4, JSON), and snapshots of interfaces in JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.errors import RecordError
from keepstep.intake.log_lines import clean
from keepstep.intake.log_patterns import Pattern, pattern
from keepstep.intake.reading import whole
from keepstep.records.evidence import Evidence, LogEvent, Unread

__all__ = ["HEALTH_PATTERNS", "LARGEST_HEALTH_BYTES", "READER", "HealthReader", "health_events"]

LARGEST_HEALTH_BYTES = 32 << 20
_MOST_RESULTS = 10_000
_IB_PORT = re.compile(r"^(?P<at>.*)/infiniband/(?P<device>\w+)/ports/(?P<port>\d+)/(?P<what>rate|state|phys_state)$")
_SPEED = re.compile(r"^(?P<at>.*)/net/[\w.-]+/speed$")
_OPERSTATE = re.compile(r"/net/(?P<device>[\w.-]+)/operstate$")

HEALTH_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "health_check",
        "pass|fail|warn|skip",
        expression=(
            r"^\W*\|\s*(?P<test>[A-Za-z][\w /().-]*?)\s*\|\s*(?P<status>Pass|Fail|Warn|Skip)\b[^"
            r"|\n]*(?P<reason>.*)$"
        ),
    ),
    pattern(
        "health_reason", "warning|error|info", expression=r"^\W*\|\s*(?:Warning|Error|Info)\s*\|\s*(?P<reason>[^|\n]+)"
    ),
)


def health_events(content: bytes, *, path: str, line: int = 1) -> Iterator[LogEvent]:
    """Events of a JSON document that is the result of a health check; nothing if it is something else.

    Raises RecordError if it is no JSON.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {str(error)[:100]}", where=path) from error
    found = _diagnostic(document) or _interfaces(document) or _sysfs(document)
    for kind, fields in found[:_MOST_RESULTS]:
        text = clean(", ".join(f"{key} {value}" for key, value in fields.items() if value))[:500]
        yield LogEvent(kind=kind, path=path, line=line, text=text, fields=fields)


_Found = list[tuple[str, dict[str, str]]]


def _diagnostic(document: Any) -> _Found:
    """`DCGM Diagnostic` (version 4) or `DCGM GPU Diagnostic` (version 3): one result for each test and device."""
    body = next(
        (value for key, value in _items(document) if "diagnostic" in key.lower() and isinstance(value, dict)), None
    )
    found: _Found = []
    for category in _list(body, "test_categories"):
        for test in _list(category, "tests"):
            for result in _list(test, "results"):
                found.append(("health_check", _result(result, test=test, category=category)))
    return found


def _result(result: Any, *, test: Any, category: Any) -> dict[str, str]:
    """`device` is the number of the GPU, `reason` the warnings of this result."""
    reasons = [
        str(note.get("warning", "")) if isinstance(note, dict) else str(note)
        for note in _as_list(_get(result, "warnings"))
    ]
    device = _get(result, "entity_id")
    return {
        "source": "DCGM",
        "category": str(_get(category, "category") or ""),
        "test": str(_get(test, "name") or ""),
        "status": str(_get(result, "status") or "").capitalize(),
        "device": str(device if device is not None else _get(result, "gpu_id") or ""),
        "reason": clean(" ".join(reasons))[:400],
    }


def _interfaces(document: Any) -> _Found:
    """`ip -j address`: interfaces with a cable that is dead."""
    found: _Found = []
    listed = document if isinstance(document, list) else _list(document, "intf_status")
    for one in listed:
        name, flags = str(_get(one, "ifname") or ""), _as_list(_get(one, "flags"))
        if not name or "LOOPBACK" in flags:
            continue
        if "NO-CARRIER" in flags or (_get(one, "operstate") == "DOWN" and "UP" in flags):
            found.append(("nic_down", {"device": name, "source": "interfaces"}))
        else:
            found.append(("health_check", {"source": "interfaces", "test": name, "status": "Pass"}))
    return found


def _sysfs(document: Any) -> _Found:
    """A snapshot of /sys: InfiniBand ports that are not active, or slower than the other ports of the node or than the
    interface on the same adapter says it is."""
    ports: dict[str, dict[str, str]] = {}
    speeds: dict[str, int] = {}
    found: _Found = []
    for path, value in _items(document):
        text = value.strip() if isinstance(value, str) else ""
        if port := _IB_PORT.search(path):
            ports.setdefault(f"{port['device']}:{port['port']}", {"at": port["at"]})[port["what"]] = text
        elif (interface := _SPEED.search(path)) and text.isdecimal():
            speeds[interface["at"]] = max(speeds.get(interface["at"], 0), int(text) // 1000)
        elif (state := _OPERSTATE.search(path)) and text.lower() == "down":
            found.append(("nic_down", {"device": state["device"], "source": "interfaces"}))
    rates = Counter(_rate(port) for port in ports.values())
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    for name, said in ports.items():
        if "ACTIVE" not in said.get("state", "ACTIVE").upper() or "UP" not in said.get("phys_state", "UP").upper():
            found.append(("nic_down", {"device": name, "source": "interfaces"}))
        elif _rate(said) < (wanted := max(usual, speeds.get(said["at"], 0) if _rate(said) else 0)):
            found.append(("nic_rate", {"device": name, "rate": str(_rate(said)), "wanted": str(wanted)}))
        else:
            found.append(("health_check", {"source": "interfaces", "test": name, "status": "Pass"}))
    return found


def _rate(port: dict[str, str]) -> int:
    match = re.match(r"\d+", port.get("rate", ""))
    return int(match[0]) if match else 0


def _items(document: Any) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in document.items()] if isinstance(document, dict) else []


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: Any, key: str) -> list[Any]:
    return _as_list(_get(value, key))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


class HealthReader:
    """JSON of health checks."""

    @property
    def name(self) -> str:
        """What people call it."""
        return "health check result"

    def recognises(self, path: Path, head: bytes) -> bool:
        """JSON that names DCGM's categories, interfaces, or paths under /sys."""
        start = head.lstrip()[:1]
        marks = (b'"test_categories"', b'"intf_status"', b"/sys/bus/pci/", b"/sys/class/", b'"operstate"')
        return start in (b"{", b"[") and any(mark in head for mark in marks)

    def read(self, path: Path) -> Iterator[Evidence]:
        """Events of the results. A document that is cut off is an Unread."""
        content, complete = whole(path, limit=LARGEST_HEALTH_BYTES)
        try:
            yield from health_events(content, path=str(path))
        except RecordError as error:
            yield Unread(path=str(path), why=error.what if complete else "the compressed file is cut off")


READER = HealthReader()
