"""The command that moves ranks of a running job to other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepstep.records.moves import MoveRequest

__all__ = ["add_to", "move"]


def add_to(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(move)


def move(
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Directory of the running job.")],
    rank: Annotated[
        list[int] | None, typer.Option(help="Which rank; once for each rank that moves.", show_default=False)
    ] = None,
    node: Annotated[str, typer.Option(help="All ranks on this node.", show_default=False)] = "",
    to: Annotated[str, typer.Option(help="Node to move to [another than now, if there is one].")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Say how it went, or only what will happen.")] = True,
) -> int:
    """Give ranks of a running job to other processes, here or on another node, while training goes on."""
    from keepstep.service.control_socket import ask_move

    print(ask_move(run, MoveRequest(tuple(rank or ()), node, to, wait)))
    return 0
