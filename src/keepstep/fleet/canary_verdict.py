"""Whether a canary came to a clean end: what its report says."""

from __future__ import annotations

from keepstep.fleet.report import RunReport
from keepstep.records.finding import QUIET

__all__ = ["canary_trouble"]


def canary_trouble(report: RunReport, *, steps: int) -> str:
    """Why the job must not get all its ranks; empty if nothing speaks against it. It was to make `steps`."""
    if report.exit_code != 0:
        return f"it ended with {report.exit_code}: {report.why}"
    found = [finding for finding in report.findings if finding.kind not in QUIET]
    if found:
        ranks = f", rank {found[0].ranks[0]}" if found[0].ranks else ""
        return f"{len(found)} findings, the first {found[0].kind}{ranks}"
    if report.incidents:
        return f"{len(report.incidents)} ranks were lost, the first by {report.incidents[0].kind}"
    if 0 < report.steps_kept < steps and report.why:
        return f"it made {report.steps_kept} of {steps} steps: {report.why}"
    return ""
