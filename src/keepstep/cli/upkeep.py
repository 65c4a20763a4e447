"""Commands about what is there: reports, this machine, old run directories, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.options import Directory, Printed, SettingsFile, TextOrJson, settings_from

__all__ = ["add_to", "clean", "doctor", "report", "version"]


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (report, doctor, clean, version):
        app.command()(command)


def report(directory: Directory, format: Printed = TextOrJson.text) -> int:
    """Print what a run lost and kept, with the time line of every incident."""
    from keepstep.service.reports import report_of

    print(report_of(directory, json=format is TextOrJson.json))
    return 0


def doctor(format: Printed = TextOrJson.text) -> int:
    """Say what is missing on this machine; exit code 1 if something needed is."""
    from keepstep.service.doctor import examine, healthy, show

    checks = examine()
    print(show(checks, json=format is TextOrJson.json))
    return 0 if healthy(checks) else 1


def clean(
    run_root: Annotated[Path | None, typer.Option(help="Directory of run directories [keepstep-runs].")] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Newest runs that stay [20].")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes the runs may take; the oldest go first.")] = None,
    settings: SettingsFile = None,
) -> int:
    """Remove old run directories, and old evidence in those that stay. A running job's is never touched, nor anything
    that is no run directory."""
    from keepstep.service.bundles import Retention
    from keepstep.service.clean import remove_old_evidence, remove_old_runs

    chosen = settings_from(settings, keep_runs=keep, run_root=str(run_root) if run_root else None)
    for removed in remove_old_runs(Path(chosen.run_root), keep=chosen.keep_runs, max_bytes=max_bytes):
        print(f"removed {removed}")
    retention = Retention(chosen.keep_findings, chosen.evidence_bytes)
    for removed in remove_old_evidence(Path(chosen.run_root), retention):
        print(f"removed {removed}")
    return 0


def version() -> int:
    """Print the versions of keepstep, Python and torch."""
    import platform

    from keepstep import __version__
    from keepstep.service.job_host import torch_version

    print(f"keepstep {__version__}, Python {platform.python_version()}, torch {torch_version() or 'not installed'}")
    return 0
