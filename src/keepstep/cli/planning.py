"""Commands that say beforehand what would happen: `keepstep plan coverage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.options import Printed, TextOrJson
from keepstep.errors import UsageError

__all__ = ["add_to", "coverage"]


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    family = typer.Typer(help="Say beforehand what would happen.", no_args_is_help=True)
    family.command()(coverage)
    family.callback()(lambda: None)
    app.add_typer(family, name="plan")


def coverage(
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Of this run, as it is now.")] = None,
    domains: Annotated[
        list[str] | None, typer.Option("--domains", metavar="FILE", help="Domains of nodes: TOML or a topology.")
    ] = None,
    world: Annotated[int, typer.Option(min=0, help="Ranks of the planned job.")] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 8,
    standby: Annotated[int, typer.Option(min=0, help="Standbys on each of these nodes.")] = 0,
    spare: Annotated[int, typer.Option(min=0, help="More nodes that hold standbys only.")] = 0,
    replicas: Annotated[int, typer.Option(min=0, help="Copies of each state among the ranks; 0: all are alike.")] = 0,
    mirrors: Annotated[bool, typer.Option("--mirrors", help="Each rank's state is mirrored on another node.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: none.")] = 0,
    max_restarts: Annotated[int, typer.Option(min=0, help="Whole restarts.")] = 3,
    wait: Annotated[bool, typer.Option("--wait", help="With too few machines the job waits (on_shortage).")] = False,
    format: Printed = TextOrJson.text,
) -> int:
    """Predict for each failure domain what its loss would cost: ranks, standbys and state left, and the outcome."""
    from keepstep.service.coverage_desk import CoveragePlan, plan_coverage, shown, told_coverage

    if (run is None) == (not domains):
        raise UsageError("give either --run or --domains", remedy="see keepstep plan coverage --help")
    if run is not None:
        print(shown(told_coverage(run), json=format is TextOrJson.json))
        return 0
    if not world:
        raise UsageError("a planned job needs --world", remedy="give its number of ranks")
    plan = CoveragePlan(
        world=world,
        per_node=per_node,
        standby=standby,
        replicas=replicas,
        mirrors=mirrors,
        checkpoint_every=checkpoint_every,
        spare=spare,
        restarts=max_restarts,
        waits=wait,
    )
    print(shown(plan_coverage(tuple(domains or ()), plan), json=format is TextOrJson.json))
    return 0
