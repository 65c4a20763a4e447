"""`keepstep preflight`: what of a script would fail in a large world, before machines are taken for it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from keepstep.cli.options import Printed, TextOrJson

__all__ = ["OwnOptionsBehind", "add_to", "preflight"]

_VALUED = frozenset(
    {"--as-world", "--role", "--steps", "--format", "--nproc-per-node", "--node-memory", "--memory"}
    | {"--timeout", "--total-timeout"}
)


class OwnOptionsBehind(TyperCommand):
    """A command whose own options may stand before the script, or behind it from `--as-world` on."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, with the own options in front."""
        return super().parse_args(ctx, _own_first(args))


def _own_first(words: list[str]) -> list[str]:
    """The words from `--as-world` on, as long as they are own options, before all others. `--` ends them."""
    start = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--as-world"), len(words))
    end = start
    while end < len(words) and words[end].partition("=")[0] in _VALUED:
        end += 1 if "=" in words[end] else 2
    tail = words[end:]
    return [*words[start:end], *words[:start], *(tail[1:] if tail[:1] == ["--"] else tail)]


def add_to(app: typer.Typer) -> None:
    """Register the command of this module."""
    settings = {"allow_interspersed_args": False}
    app.command(cls=OwnOptionsBehind, context_settings=settings)(preflight)


def preflight(
    script: Annotated[str, typer.Argument(help="Python file; its own arguments come after it.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="Arguments of the script.")] = None,
    as_world: Annotated[int, typer.Option(min=1, help="Ranks of the job that is tried out.", show_default=False)] = 0,
    role: Annotated[list[int] | None, typer.Option(min=0, help="Try out this rank, too; many times.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a trial: 1 or 2.")] = 2,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Ranks on a node [8, and no finding about memory].")
    ] = None,
    node_memory: Annotated[
        float | None, typer.Option(min=0.001, metavar="GIB", help="Memory of a node [that of this machine].")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.001, metavar="GIB", help="Most memory of a trial [most of what is free].")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Most seconds of a trial.")] = 120.0,
    total_timeout: Annotated[float, typer.Option(min=1, max=604800, help="No trial begins after so many s.")] = 600.0,
    format: Printed = TextOrJson.text,
) -> int:
    """Try out the first steps of some ranks alone, as in a world of any size; exit code 1 with findings.

    Communication is cut off, files are written into a scratch directory. Options of its own stand before the script, or
    behind it from --as-world on.
    """
    import msgspec

    from keepstep.errors import UsageError
    from keepstep.service.preflight_text import preflight_text
    from keepstep.service.preflighting import PreflightRequest
    from keepstep.service.preflighting import preflight as try_out
    from keepstep.service.stop_signals import ended_by_signals

    if not as_world:
        raise UsageError("no world to try it out for", remedy="give --as-world N")
    request = PreflightRequest(
        script=script,
        arguments=tuple(arguments or ()),
        world=as_world,
        roles=tuple(role or ()),
        steps=steps,
        local=nproc_per_node or 0,
        node_bytes=int((node_memory or 0) * (1 << 30)),
        memory_bytes=int((memory or 0) * (1 << 30)),
        trial_s=timeout,
        whole_s=total_timeout,
    )
    with ended_by_signals():
        report = try_out(request, say=lambda line: print(f"keepstep: {line}", file=sys.stderr))
    if format is TextOrJson.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(preflight_text(report), end="")
    return report.exit_code
