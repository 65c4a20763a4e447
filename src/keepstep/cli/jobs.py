"""Commands that run a job, or do something to one that runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from keepstep.cli.options import SettingsFile, settings_from
from keepstep.errors import UsageError
from keepstep.records.drills import DRILLS, DrillRequest

__all__ = ["add_to", "agent", "controller", "drill", "resume", "run"]

_PASS_ON = {"allow_interspersed_args": False}


_Script = Annotated[str, typer.Argument(help="Python file; everything after it is its own.", show_default=False)]
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="Arguments of the script.")]
_Ranks = Annotated[int | None, typer.Option("--nproc-per-node", help="Ranks on this node [1].")]
_Standbys = Annotated[
    int | None, typer.Option("--standby", help="Warm processes that wait to replace a rank [0]; each costs memory.")
]
_Restarts = Annotated[int | None, typer.Option(help="Whole restarts when a member cannot be replaced [3].")]
_Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Run directory [a new one under keepstep-runs].")
]
_Traffic = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Plan the paths of large flows by this TOML file [leave them to chance]."),
]
_OnHang = Annotated[
    str | None,
    typer.Option(
        metavar="observe|replace",
        help="What follows from hard evidence that a rank hangs: nothing, or its place goes to a standby [replace].",
    ),
]
_Level = Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")]
_StartDrills = Annotated[
    list[str] | None,
    typer.Option("--drill", metavar="NAME:RANK", help="Start this rank with a fault: never-start or wrong-version."),
]
_Domain = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="KIND=LABEL", help="A failure domain of this node, as rack=r1; may be repeated."),
]
_Domains = Annotated[
    list[str] | None,
    typer.Option("--domains", metavar="FILE", help="Failure domains of nodes: TOML or a topology; may be repeated."),
]
_OnShortage = Annotated[
    str | None,
    typer.Option(metavar="wait|stop", help="What to do with fewer machines than members [stop]."),
]
_Canary = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Run N ranks for a few steps first, and go on only after a clean end."),
]
_CanarySteps = Annotated[int, typer.Option(min=1, help="Steps of the canary.")]
_Token = Annotated[
    str | None, typer.Option(metavar="FILE", help="Secret of controller and agents, mode 0600 [DIR/token].")
]


def _faults() -> str:
    """The help of the drills."""
    return "; ".join(f"{name}: {kind.says}" for name, kind in DRILLS.items() if kind.by != "start") + "."


def _known(fault: str) -> str:
    """`fault` if there is such a drill. Raises UsageError."""
    if fault not in DRILLS:
        raise UsageError(f"no such drill: {fault}", remedy=f"one of {', '.join(DRILLS)}")
    return fault


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command(context_settings=_PASS_ON)(run)
    app.command(context_settings=_PASS_ON)(controller)
    app.command()(agent)
    app.command()(resume)
    app.command()(drill)


def run(
    script: _Script,
    arguments: _Arguments = None,
    nproc_per_node: _Ranks = None,
    standby: _Standbys = None,
    max_restarts: _Restarts = None,
    run: _Run = None,
    settings: SettingsFile = None,
    on_hang: _OnHang = None,
    log_level: _Level = None,
    drill: _StartDrills = None,
    domain: _Domain = None,
    canary: _Canary = None,
    canary_steps: _CanarySteps = 10,
) -> int:
    """Train on this machine: start the ranks, replace those that are lost, print a report."""
    from keepstep.service.canary_run import Canary
    from keepstep.service.launcher import RunRequest, run_job

    chosen = settings_from(
        settings,
        nproc_per_node=nproc_per_node,
        standby=standby,
        max_restarts=max_restarts,
        on_hang=on_hang,
        log_level=log_level,
    )
    return run_job(
        RunRequest(
            script,
            tuple(arguments or ()),
            run,
            chosen,
            tuple(drill or ()),
            labels=tuple(domain or ()),
            canary=Canary(canary or 0, canary_steps),
        )
    )


def controller(
    script: _Script,
    arguments: _Arguments = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Agents to wait for.")] = 1,
    nproc_per_node: _Ranks = None,
    standby: _Standbys = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; agents elsewhere need another than this.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: any free one, printed.")] = 29400,
    job: Annotated[str, typer.Option(help="Name of the job [a new one].")] = "",
    max_restarts: _Restarts = None,
    token_file: _Token = None,
    run: _Run = None,
    settings: SettingsFile = None,
    on_hang: _OnHang = None,
    traffic: _Traffic = None,
    log_level: _Level = None,
    drill: _StartDrills = None,
    domains: _Domains = None,
    on_shortage: _OnShortage = None,
    canary: _Canary = None,
    canary_steps: _CanarySteps = 10,
) -> int:
    """Decide for a job on several nodes: wait for their agents, then as `run`. SCRIPT is the path on the nodes."""
    from keepstep.service.canary_run import Canary
    from keepstep.service.launcher import RunRequest
    from keepstep.service.remote_controller import Listening, run_controller

    chosen = settings_from(
        settings,
        nproc_per_node=nproc_per_node,
        standby=standby,
        max_restarts=max_restarts,
        token_file=token_file,
        on_hang=on_hang,
        traffic=traffic,
        log_level=log_level,
        domains=domains,
        on_shortage=on_shortage,
    )
    small = Canary(canary or 0, canary_steps)
    request = RunRequest(script, tuple(arguments or ()), run, chosen, tuple(drill or ()), canary=small)
    return run_controller(request, Listening(host, port, nnodes, job))


def agent(
    controller: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the controller listens.")],
    token_file: _Token = None,
    node: Annotated[str, typer.Option(help="Name of this node, different on each [the host name].")] = "",
    job: Annotated[str, typer.Option(help="Which job [the only one].")] = "",
    address: Annotated[
        str, typer.Option(help="Address of this node for training traffic [the one facing the controller].")
    ] = "",
    run: _Run = None,
    settings: SettingsFile = None,
    log_level: _Level = None,
    domain: _Domain = None,
) -> int:
    """Serve a controller with this node: run its part of the job."""
    import platform

    from keepstep.service.remote_agent import AgentRequest, run_agent

    chosen = settings_from(settings, token_file=token_file, log_level=log_level)
    return run_agent(AgentRequest(controller, node or platform.node(), job, run, chosen, address, tuple(domain or ())))


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory of the controller.")],
) -> int:
    """Take over a job whose controller is gone: its members train on, and its agents come back to the new one."""
    from keepstep.service.remote_controller import take_over

    return take_over(directory)


def drill(
    fault: Annotated[str, typer.Argument(metavar="FAULT", help=_faults())],
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Directory of the running job.")],
    rank: Annotated[int | None, typer.Option(help="Which rank.")] = None,
    source: Annotated[int | None, typer.Option("--from", help="Link drills: the rank that sends.")] = None,
    destination: Annotated[int | None, typer.Option("--to", help="Link drills: the rank it sends to.")] = None,
    node: Annotated[str, typer.Option(help="throttle-node, lose-node: which node.", show_default=False)] = "",
    domain: Annotated[
        str, typer.Option(metavar="KIND=LABEL", help="All nodes of this failure domain.", show_default=False)
    ] = "",
    at_step: Annotated[int, typer.Option(min=-1, help="When it reaches this step; -1: now.")] = -1,
    steps: Annotated[int, typer.Option(min=0, help="For so many steps; 0: until --stop.")] = 0,
    factor: Annotated[
        float, typer.Option(help="How many times as long a step then takes [1.3].", show_default=False)
    ] = 0.0,
    rate: Annotated[float, typer.Option(help="Link drills: bytes per second.", show_default=False)] = 0.0,
    how: Annotated[
        str, typer.Option(help="mismatch: op, shape or extra [op]; bad-release: die or slow [die].", show_default=False)
    ] = "",
    stop: Annotated[bool, typer.Option("--stop", help="End this drill.")] = False,
) -> int:
    """Inject a fault into a running job to see it found and repaired. May be given before the step is reached."""
    from keepstep.service.control_socket import ask_drill

    if not (math.isfinite(factor) and math.isfinite(rate)):
        raise UsageError("--factor and --rate must be finite numbers", remedy="for example: --factor 1.3")
    request = DrillRequest(_known(fault), rank, at_step, steps, factor, rate, source, destination, node, how, stop)
    request = msgspec.structs.replace(request, domain=domain)
    print(ask_drill(run, request))
    return 0
