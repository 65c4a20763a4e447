"""Commands that measure in a running job what would make a finding certain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_to", "probe"]


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command()(probe)


def probe(
    finding: Annotated[int, typer.Argument(min=1, metavar="FINDING", help="Its number, as `keepstep report` says.")],
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Directory of the running job.")],
) -> int:
    """Run the probe that a finding names and narrow its suspects; the result is a new finding that refers to it."""
    from keepstep.service.control_socket import ask_probe

    print(ask_probe(run, finding))
    return 0
