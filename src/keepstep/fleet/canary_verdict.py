"""Whether a canary came to a clean end: what its report and its output say."""

from __future__ import annotations

import re

from keepstep.fleet.report import RunReport

__all__ = ["bad_loss", "canary_trouble"]

_BAD_LOSS = re.compile(r"\bloss\b[\s=:]+([-+]?(?:nan|inf(?:inity)?))\b", re.IGNORECASE)


def bad_loss(line: str) -> str:
    """The loss in a printed line if it is no finite number, else nothing."""
    found = _BAD_LOSS.search(line[:512])
    return found[1] if found else ""


def canary_trouble(report: RunReport, *, steps: int, losses: dict[str, str]) -> str:
    """Why the job must not get all its ranks; empty if nothing speaks against it.

    `steps` is how many it was to make, `losses` holds losses that are no finite numbers, by where they were printed.
    """
    if report.exit_code != 0:
        return f"it ended with {report.exit_code}: {report.why}"
    if losses:
        where, loss = next(iter(losses.items()))
        return f"the loss is {loss} in {where}"
    found = [finding for finding in report.findings if finding.kind != "healthy"]
    if found:
        ranks = f", rank {found[0].ranks[0]}" if found[0].ranks else ""
        return f"{len(found)} findings, the first {found[0].kind}{ranks}"
    if report.incidents:
        return f"{len(report.incidents)} ranks were lost, the first by {report.incidents[0].kind}"
    if 0 < report.steps_kept < steps and report.why:
        return f"it made {report.steps_kept} of {steps} steps: {report.why}"
    return ""
