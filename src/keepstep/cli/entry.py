"""The application: every family of commands, and how a mistake ends."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from keepstep.cli import diagnose, fleet, jobs, move, planning, preflight, probes, traffic, upkeep
from keepstep.errors import KeepstepError

__all__ = ["app", "main"]

app = typer.Typer(
    name="keepstep",
    help="Keeps a distributed training job in step: a lost rank is replaced, no step is lost.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for family in (jobs, move, upkeep, probes, fleet, diagnose, preflight, planning, traffic):
    family.add_to(app)

_COMPLAINT: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base of all complaints about the command line; typer brings its own click, older ones the package."""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions and end.")] = False,
) -> None:
    if version:
        upkeep.version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code. A mistake is one line on stderr."""
    command = typer.main.get_command(app)
    try:
        return int(command.main(args=argv, prog_name="keepstep", standalone_mode=False) or 0)
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return int(error.exit_code)
    except typer.Exit as error:
        return int(error.exit_code)
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except _COMPLAINT as error:
        print(f"keepstep: {error.format_message()} -> see `keepstep --help`", file=sys.stderr)
        return int(error.exit_code)
