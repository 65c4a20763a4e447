"""`keepstep diagnose`: name the fault in what other tools left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.options import Printed, TextOrJson

__all__ = ["add_to", "diagnose"]


def add_to(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(diagnose)


def diagnose(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Logs, dumps, stacks, tables, directories.")],
    format: Printed = TextOrJson.text,
) -> int:
    """Name the fault in logs, stacks, dumps and tables of a job; exit code 0 if nothing is wrong, 1 with findings."""
    from keepstep.diagnosis.failure_report import failure_report
    from keepstep.service.diagnosing import as_json, diagnose_paths

    diagnosis = diagnose_paths(paths, tell=lambda text: print(f"keepstep: {text}", file=sys.stderr))
    if format is TextOrJson.json:
        print(as_json(diagnosis))
    else:
        print(failure_report(diagnosis.findings, diagnosis.unread, read=len(diagnosis.read)), end="")
    return diagnosis.exit_code
