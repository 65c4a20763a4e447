"""Results of health checks and settings in logs: a check that fails for a setting is no broken device."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from keepstep.diagnosis.log_case import LogCase, quotation, words
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, FindingKind, Layer, Suspect

__all__ = ["health_findings", "setting_findings", "slow_network_findings"]

_SETTING = re.compile(
    r"persistence|permission|environment variable|deny ?list|black ?list|graphics process"
    r"|other process|in use by|not (?:allowed|installed"
    r"|supported|found|enabled|loaded|running)|library|nvml|cuda (?:main|toolkit)|driver version"
    r"|mig\b|configuration|is_allowed|parameter|fabric manager"
    r"|clocks? (?:limit|setting)|power limit is|hostengine|root",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"\bGPU:? ?(\d{1,3})\b")
_LINK = re.compile(r"nvlink|pcie|pci-?e|bandwidth|nccl|infiniband|\bib\b|port|nic\b", re.IGNORECASE)
_MEMORY = re.compile(
    r"memory|ecc|remap|retire|dbe|sbe|diagnostic|stress|thermal|temperature|xid|inforom|sm |pulse|eud|memtest|power",
    re.IGNORECASE,
)


def health_findings(case: LogCase) -> list[Finding]:
    """What health checks say: failures of hardware by layer, or a healthy device that fails for a setting."""
    checks = case.of("health_check", claims=False)
    if not checks:
        return []
    failed = [event for event in checks if event.fields.get("status", "").lower() in ("fail", "warn")]
    passed = [event for event in checks if event.fields.get("status", "").lower() == "pass"]
    if not failed:
        return [_fine(checks, passed)]
    reasons = {id(event): _reason(case, event) for event in failed}
    hardware = [event for event in failed if not _is_setting(event, reasons[id(event)])]
    if not hardware:
        return [_only_settings(failed, passed, reasons=reasons)]
    by_layer: dict[Layer, list[LogEvent]] = defaultdict(list)
    for event in hardware:
        by_layer[_layer(event, reasons[id(event)])].append(event)
    return [_broken(layer, events, reasons=reasons) for layer, events in by_layer.items()]


def _reason(case: LogCase, event: LogEvent) -> str:
    """Why a check failed: in the result, or on the lines after it in a table."""
    if event.fields.get("reason", "").strip(" |"):
        return event.fields["reason"]
    following = [
        item for item in case.of("health_reason") if item.path == event.path and 0 < item.line - event.line <= 4
    ]
    return " ".join(item.fields["reason"] for item in following)


def _is_setting(event: LogEvent, reason: str) -> bool:
    said = f"{event.fields.get('test', '')} {reason}"
    return bool(_SETTING.search(reason or said)) and not re.search(
        r"uncorrectable|row remap\w* fail|bandwidth", reason, re.IGNORECASE
    )


def _layer(event: LogEvent, reason: str) -> Layer:
    said = f"{event.fields.get('test', '')} {reason}"
    if _LINK.search(event.fields.get("test", "")) or (_LINK.search(said) and not _MEMORY.search(said)):
        return "hardware_link"
    return "hardware_gpu"


def _fine(checks: list[LogEvent], passed: list[LogEvent]) -> Finding:
    if not passed:
        return Finding(
            kind="undetermined",
            confidence=0.1,
            evidence=(f"{len(checks)} health checks were skipped, none ran",),
            next_probe="the checks with the plugins they need (dcgmi diag -r 3 without other processes on the device)",
        )
    return Finding(
        kind="healthy",
        confidence=0.85,
        evidence=(f"{len(passed)} health checks passed, none failed", *(quotation(event) for event in passed[:3])),
    )


def _only_settings(failed: list[LogEvent], passed: list[LogEvent], *, reasons: dict[int, str]) -> Finding:
    names = sorted({event.fields.get("test", "") for event in passed})
    said = list(dict.fromkeys(reasons[id(event)].strip(" |") or event.fields.get("test", "") for event in failed))
    return Finding(
        kind="healthy",
        layer="configuration",
        confidence=0.9 if passed else 0.6,
        evidence=(
            "what fails is a setting of the node, not its hardware",
            *said[:3],
            f"tests of the hardware passed: {words(names)}" if names else "no test of the hardware ran",
        ),
        next_probe="correct the setting and repeat the check; do not drain the node for hardware",
    )


def _broken(layer: Layer, events: list[LogEvent], *, reasons: dict[int, str]) -> Finding:
    kind: FindingKind = "communication_slow" if layer == "hardware_link" else "crash"
    devices: dict[tuple[str | None, str | None], LogEvent] = {}
    for event in events:
        named = _DEVICE.search(reasons[id(event)])
        devices.setdefault((event.node, event.fields.get("device") or (named[1] if named else None)), event)
    suspects = tuple((Suspect(node=node, device=device),) for node, device in devices if node or device)
    return Finding(
        kind=kind,
        layer=layer,
        suspects=suspects,
        confidence=0.85,
        evidence=(
            f"health checks fail: {words(sorted({event.fields.get('test', '') for event in events}))}",
            *(reasons[id(event)].strip(" |") or quotation(event) for event in events[:3]),
        ),
        next_probe="drain the node; a longer run of the same check (dcgmi diag -r 3) after a reset of the device",
    )


def setting_findings(case: LogCase) -> list[Finding]:
    """Nodes that use another network than the others, or another version of NCCL."""
    return [*_network(case), *_versions(case)]


def slow_network_findings(case: LogCase) -> list[Finding]:
    """A log of communication alone, in which a setting switches the fast network off: a hint where nothing else is."""
    off = [
        event for event in case.of("nccl_transport_off", claims=False) if event.fields.get("what", "").upper() == "IB"
    ]
    sockets = [event for event in case.of("nccl_network", claims=False) if "socket" in event.fields["network"].lower()]
    if not off or not sockets or case.has("step_progress", "training_ended"):
        return []
    return [
        Finding(
            kind="communication_slow",
            layer="configuration",
            confidence=0.5,
            evidence=(
                "a setting switches InfiniBand off, and sockets are used",
                quotation(off[0]),
                quotation(sockets[0]),
            ),
            next_probe="the same run without NCCL_IB_DISABLE; bandwidth by nccl-tests",
        )
    ]


def _network(case: LogCase) -> list[Finding]:
    by_node: dict[str, str] = {}
    lines: dict[str, LogEvent] = {}
    for event in case.of("nccl_network", claims=False):
        node = event.node or (f"rank {event.rank}" if event.rank is not None else "")
        if node:
            by_node[node] = "Socket" if "socket" in event.fields["network"].lower() else "fast"
            lines[node] = event
    slow = sorted(node for node, network in by_node.items() if network == "Socket")
    if not slow or len(slow) == len(by_node):
        return []
    return [
        Finding(
            kind="communication_slow",
            layer="configuration",
            suspects=tuple((_place(lines[node]),) for node in slow[:16]),
            confidence=0.8,
            evidence=(
                f"{words(slow)} use sockets where {len(by_node) - len(slow)} others use a faster network",
                *(quotation(lines[node]) for node in slow[:3]),
            ),
            next_probe="ibv_devinfo, NCCL_IB_HCA and NCCL_IB_DISABLE on these nodes",
        )
    ]


def _place(event: LogEvent) -> Suspect:
    return Suspect(node=event.node) if event.node else Suspect(rank=event.rank)


def _versions(case: LogCase) -> list[Finding]:
    by_node = {event.node: event for event in case.of("nccl_version", claims=False) if event.node}
    versions = Counter(event.fields["version"] for event in by_node.values())
    if len(versions) < 2:
        return []
    usual = versions.most_common(1)[0][0]
    odd = sorted(node for node, event in by_node.items() if node and event.fields["version"] != usual)
    return [
        Finding(
            kind="startup_disagrees",
            layer="configuration",
            suspects=tuple((Suspect(node=node),) for node in odd[:16]),
            confidence=0.85,
            evidence=(
                f"nodes run different versions of NCCL: {words(sorted(versions))}",
                *(quotation(by_node[node]) for node in odd[:3]),
            ),
            next_probe="one image on all nodes",
        )
    ]
