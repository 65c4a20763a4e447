"""The command line: parse, call one function, print. Imports nothing heavy before a command is chosen."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.errors import KeepstepError

__all__ = ["agent", "app", "clean", "controller", "doctor", "drill", "main", "report", "run", "version"]

app = typer.Typer(
    name="keepstep",
    help="Keeps a distributed training job in step: a lost rank is replaced, no step is lost.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
_COMPLAINT: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base of all complaints about the command line; typer brings its own click, older ones the package."""
_PASS_ON = {"allow_interspersed_args": False}


class _Format(StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


class _Fault(StrEnum):
    """What a drill does."""

    kill = "kill"
    freeze = "freeze"


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
_SettingsFile = Annotated[Path | None, typer.Option("--settings", metavar="FILE", help="TOML file of settings.")]
_Level = Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")]
_Token = Annotated[
    str | None, typer.Option(metavar="FILE", help="Secret of controller and agents, mode 0600 [DIR/token].")
]
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.")]
_Printed = Annotated[_Format, typer.Option("--format", help="text or json.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions and end.")] = False,
) -> None:
    if version:
        _say_versions()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command(context_settings=_PASS_ON)
def run(
    script: _Script,
    arguments: _Arguments = None,
    nproc_per_node: _Ranks = None,
    standby: _Standbys = None,
    max_restarts: _Restarts = None,
    run: _Run = None,
    settings: _SettingsFile = None,
    log_level: _Level = None,
) -> int:
    """Train on this machine: start the ranks, replace those that are lost, print a report."""
    from keepstep.service.launcher import RunRequest, run_job

    chosen = _settings(
        settings, nproc_per_node=nproc_per_node, standby=standby, max_restarts=max_restarts, log_level=log_level
    )
    return run_job(RunRequest(script, tuple(arguments or ()), run, chosen))


@app.command(context_settings=_PASS_ON)
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
    settings: _SettingsFile = None,
    log_level: _Level = None,
) -> int:
    """Decide for a job on several nodes: wait for their agents, then as `run`. SCRIPT is the path on the nodes."""
    from keepstep.service.launcher import RunRequest
    from keepstep.service.remote_controller import Listening, run_controller

    chosen = _settings(
        settings,
        nproc_per_node=nproc_per_node,
        standby=standby,
        max_restarts=max_restarts,
        token_file=token_file,
        log_level=log_level,
    )
    request = RunRequest(script, tuple(arguments or ()), run, chosen)
    return run_controller(request, Listening(host, port, nnodes, job))


@app.command()
def agent(
    controller: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the controller listens.")],
    token_file: _Token = None,
    node: Annotated[str, typer.Option(help="Name of this node, different on each [the host name].")] = "",
    job: Annotated[str, typer.Option(help="Which job [the only one].")] = "",
    run: _Run = None,
    settings: _SettingsFile = None,
    log_level: _Level = None,
) -> int:
    """Serve a controller with this node: run its part of the job."""
    import platform

    from keepstep.service.remote_agent import AgentRequest, run_agent

    chosen = _settings(settings, token_file=token_file, log_level=log_level)
    return run_agent(AgentRequest(controller, node or platform.node(), job, run, chosen))


@app.command()
def drill(
    fault: Annotated[_Fault, typer.Argument(help="kill (SIGKILL) or freeze (SIGSTOP).")],
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Directory of the running job.")],
    rank: Annotated[int, typer.Option(help="Which rank.")],
    at_step: Annotated[int, typer.Option(min=-1, help="When it reaches this step; -1: now.")] = -1,
) -> int:
    """Inject a fault into a running job to see it repaired. May be given before the step is reached."""
    from keepstep.service.control_socket import DrillRequest, ask_drill

    print(ask_drill(run, DrillRequest(fault.value, rank, at_step)))
    return 0


@app.command()
def report(directory: _Directory, format: _Printed = _Format.text) -> int:
    """Print what a run lost and kept, with the time line of every incident."""
    from keepstep.service.reports import report_of

    print(report_of(directory, json=format is _Format.json))
    return 0


@app.command()
def doctor(format: _Printed = _Format.text) -> int:
    """Say what is missing on this machine; exit code 1 if something needed is."""
    from keepstep.service.doctor import examine, healthy, show

    checks = examine()
    print(show(checks, json=format is _Format.json))
    return 0 if healthy(checks) else 1


@app.command()
def clean(
    run_root: Annotated[Path | None, typer.Option(help="Directory of run directories [keepstep-runs].")] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Newest runs that stay [20].")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes the runs may take; the oldest go first.")] = None,
    settings: _SettingsFile = None,
) -> int:
    """Remove old run directories. A running job's is never touched, nor anything that is no run directory."""
    from keepstep.service.clean import remove_old_runs

    chosen = _settings(settings, keep_runs=keep, run_root=str(run_root) if run_root else None)
    for removed in remove_old_runs(Path(chosen.run_root), keep=chosen.keep_runs, max_bytes=max_bytes):
        print(f"removed {removed}")
    return 0


@app.command()
def version() -> int:
    """Print the versions of keepstep, Python and torch."""
    _say_versions()
    return 0


def _say_versions() -> None:
    import platform

    from keepstep import __version__
    from keepstep.service.job_host import torch_version

    print(f"keepstep {__version__}, Python {platform.python_version()}, torch {torch_version() or 'not installed'}")


def _settings(file: Path | None, **overrides: Any) -> Any:
    from keepstep.service.settings import load_settings

    return load_settings(file, overrides=overrides)


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


if __name__ == "__main__":
    sys.exit(main())
