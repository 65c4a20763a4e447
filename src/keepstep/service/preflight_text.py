"""The result of a preflight for people."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.service.preflighting import PreflightReport

__all__ = ["preflight_text"]

_MIB, _GIB = 1 << 20, 1 << 30
_MOST_NOTES = 12


def preflight_text(report: PreflightReport) -> str:
    """Lines, with an end of line at the end."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: PreflightReport) -> Iterator[str]:
    tried = len(report.ranks)
    yield f"{report.script} as a world of {report.world}: {tried} ranks tried out in {report.seconds:.1f} s"
    for one in report.ranks:
        peak = f", peak {one.peak_bytes // _MIB} MiB" if one.peak_bytes else ""
        yield (
            f"  rank {one.rank} ({one.kind}): {one.ended}, {one.steps} steps, {one.calls} calls, {one.seconds} s" + peak
        )
    if report.memory is not None:
        memory = report.memory
        yield (
            f"memory, measured here: peak {memory.measured_bytes / _GIB:.2f} GiB on rank {memory.rank}; modelled: "
            f"{memory.local} ranks on a node {memory.modelled_bytes / _GIB:.1f} of {memory.node_bytes / _GIB:.1f} GiB"
        )
    for number, finding in enumerate(report.findings, 1):
        yield f"finding {number}: {finding.kind}: {finding.what}"
        yield from (f"  {label}: {text}" for label, text in _details(finding.sites, finding.evidence))
        yield f"  do: {finding.remedy}"
    for rank, text in report.output.items():
        yield f"last lines of rank {rank}:"
        yield from (f"  {line}" for line in text.splitlines())
    for note in report.notes[:_MOST_NOTES]:
        yield f"note: {note}"
    if len(report.notes) > _MOST_NOTES:
        yield f"note: {len(report.notes) - _MOST_NOTES} more, see --format json"
    yield f"not looked at: {'; '.join(report.not_looked_at)}"
    yield f"{len(report.findings)} findings" if report.findings else "nothing found that would fail"


def _details(sites: tuple[str, ...], evidence: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if sites:
        yield "at", ", ".join(sites)
    for text in evidence:
        yield "evidence", text
