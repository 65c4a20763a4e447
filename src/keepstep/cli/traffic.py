"""Commands that plan the network: `keepstep traffic show, plan, model, observe, export, site, probe, ...`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.cli.options import Printed, TextOrJson
from keepstep.cli.traffic_probe import probe, sink

__all__ = ["Stage", "add_to", "export", "model", "observe", "plan", "published", "show", "site"]


def _above_zero(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a number above 0")
    return value


def _finite(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{value:g} is not a number of at least 0")
    return value


_TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file of any kind.")]
_JobFiles = Annotated[list[Path], typer.Argument(metavar="JOB...", help="Job files (YAML).")]
_Gbps = Annotated[float, typer.Option(callback=_above_zero, help="Gbit/s of a NIC port where the file does not say.")]
_UplinkGbps = Annotated[
    float, typer.Option(callback=_finite, help="Gbit/s of a cable where the file does not say; 0: as a port.")
]
_Spines = Annotated[int, typer.Option(min=1, max=4096, help="Switches that each one above the leaves stands for.")]
_HostNics = Annotated[Path | None, typer.Option(help="NCCL topology XML of one host; every host gets its NICs.")]
_Svg = Annotated[Path | None, typer.Option(help="Draw it into this file.")]
_Down = Annotated[list[str] | None, typer.Option(help="A link `leaf0>spine1` or a switch that is down; many times.")]
_Efficiency = Annotated[
    float, typer.Option(min=0.01, max=1.0, callback=_finite, help="Part of a link's rate that payload reaches.")
]
_Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Hash functions tried.")]
_Everything = Annotated[bool, typer.Option("--everything", help="Plan also what is better left to hashing.")]
_ByBytes = Annotated[bool, typer.Option("--by-bytes", help="Weigh flows by their bytes, do not count them.")]
_Parts = Annotated[int, typer.Option(min=1, max=64, help="Connections that share the bytes of an edge.")]


class Stage(StrEnum):
    """How far plans are trusted."""

    advise = "advise"
    low_priority = "low_priority"
    large_known = "large_known"


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    family = typer.Typer(help="Plan the network: keep large flows apart.", no_args_is_help=True)
    for command in (show, plan, model, observe, export, site, published, probe, sink):
        family.command()(command)
    app.add_typer(family, name="traffic")


def show(
    topology: _TopologyFile,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    host_nics: _HostNics = None,
    svg: _Svg = None,
    yaml: Annotated[Path | None, typer.Option(help="Write it in our own format into this file.")] = None,
    format: Printed = TextOrJson.text,
) -> int:
    """Print a topology, and draw it. Exit code 65 if it has switches or no host and cannot be planned on, or cannot be
    drawn."""
    from keepstep.intake.topology_yaml import write_yaml_topology
    from keepstep.service.traffic_files import write_text
    from keepstep.service.traffic_text import topology_text
    from keepstep.traffic.checking import problems
    from keepstep.traffic.drawing import draw
    from keepstep.traffic.network import Network

    _keep_inputs((svg, yaml), (topology, host_nics))
    read = _topology(topology, gbps, uplink_gbps, spines, host_nics)
    wrong = problems(read)
    text = topology_text(read, wrong)
    if yaml is not None:
        write_text(yaml, write_yaml_topology(read))
    if svg is not None and wrong:
        text += f"\n  {svg} is not drawn: {wrong[0]}"
    elif svg is not None:
        write_text(svg, draw(Network(read)))
    _print(format, {"topology": read, "problems": wrong}, text)
    return 65 if wrong and (read.switches or not read.ports or svg is not None) else 0


def plan(
    topology: _TopologyFile,
    jobs: _JobFiles,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    host_nics: _HostNics = None,
    down: _Down = None,
    parts: _Parts = 1,
    by_bytes: _ByBytes = False,
    everything: _Everything = False,
    routes: Annotated[bool, typer.Option("--routes", help="Print every route.")] = False,
    svg: _Svg = None,
    format: Printed = TextOrJson.text,
) -> int:
    """Plan the flows of some jobs together, and say how far from the best possible the plan is."""
    from keepstep.service.traffic_files import write_text
    from keepstep.service.traffic_planning import plan_jobs
    from keepstep.service.traffic_text import plan_text
    from keepstep.traffic.drawing import draw

    _keep_inputs((svg,), (topology, host_nics, *jobs))
    read = _topology(topology, gbps, uplink_gbps, spines, host_nics)
    planner = plan_jobs(read, jobs, down=down or (), parts=parts, by_bytes=by_bytes, everything=everything)
    made = planner.plan()
    if svg is not None:
        title = f"{read.name}: at most {made.max_load:.3g} flows on a cable"
        write_text(svg, draw(planner.network, made.routes, bound=made.bound, title=title))
    _print(format, made, plan_text(planner, made, routes=routes))
    return 0


def model(
    topology: _TopologyFile,
    jobs: _JobFiles,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    host_nics: _HostNics = None,
    down: _Down = None,
    parts: _Parts = 1,
    seeds: _Seeds = 20,
    efficiency: _Efficiency = 1.0,
    format: Printed = TextOrJson.text,
) -> int:
    """Predict transfer times with the plan and with hashing (equal-cost multipath). All figures are modelled."""
    from keepstep.service.traffic_planning import modelled_jobs, plan_jobs
    from keepstep.service.traffic_text import comparison_text

    read = _topology(topology, gbps, uplink_gbps, spines, host_nics)
    planner = plan_jobs(read, jobs, down=down or (), parts=parts, by_bytes=False, everything=True)
    found = modelled_jobs(planner, seeds=seeds, efficiency=efficiency)
    _print(format, {"modelled": True, "jobs": found}, comparison_text(found, seeds))
    return 0


def observe(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory with recorder rings.")],
    topology: _TopologyFile,
    hosts: Annotated[str, typer.Option(help="Hosts the ranks sat on, in order, as `h[0-3]`; else the journal's.")] = "",
    job: Annotated[str, typer.Option(help="Name of the job.")] = "run",
    steps: Annotated[int, typer.Option(min=0, help="Steps to price; 0: those recorded.")] = 0,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    seeds: _Seeds = 20,
    efficiency: _Efficiency = 1.0,
    format: Printed = TextOrJson.text,
) -> int:
    """The flows that a recorded run sent, and the part of its waiting that collisions explain, in GPU-hours."""
    from keepstep.intake.hostlist import checked_names
    from keepstep.service.traffic_planning import priced_run
    from keepstep.service.traffic_text import cost_text

    read = _topology(topology, gbps, uplink_gbps, spines, None)
    checked_names((job,), where="--job")
    observed, cost = priced_run(run, read, job=job, hosts=hosts, steps=steps, choice=(seeds, efficiency))
    _print(format, {"observed": observed, "cost": cost}, cost_text(cost))
    return 0


def export(
    topology: _TopologyFile,
    jobs: _JobFiles,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    host_nics: _HostNics = None,
    traffic_class: Annotated[
        int | None, typer.Option(min=0, max=255, help="NCCL_IB_TC; the class that switches keep lossless.")
    ] = None,
    format: Printed = TextOrJson.text,
) -> int:
    """The settings of NCCL that come nearest to the plan, and what NCCL cannot be told. Nobody has run them here."""
    from keepstep.service.traffic_planning import exported, plan_jobs

    read = _topology(topology, gbps, uplink_gbps, spines, host_nics)
    planner = plan_jobs(read, jobs, down=(), parts=1, by_bytes=False, everything=True)
    found = exported(planner, jobs, traffic_class=traffic_class, topology_file=host_nics)
    _print(format, found, "\n\n".join(one.text() for one in found))
    return 0


def site(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the site's plan.")],
    start: Annotated[Path | None, typer.Option(help="Begin a site with this topology file.")] = None,
    arrive: Annotated[list[Path] | None, typer.Option(help="A job that comes (job file); many times.")] = None,
    leave: Annotated[list[str] | None, typer.Option(help="A job that goes; many times.")] = None,
    down: _Down = None,
    up: Annotated[list[str] | None, typer.Option(help="A link or switch that is back; many times.")] = None,
    outcome: Annotated[float | None, typer.Option(help="Measured gain of the newest arrival, such as 1.4.")] = None,
    stage: Annotated[Stage, typer.Option(help="How far plans are trusted.")] = Stage.advise,
    low_priority: Annotated[int, typer.Option(help="Jobs up to this priority are planned from stage two on.")] = 0,
    large_ranks: Annotated[
        int, typer.Option(min=0, help="Ranks from which a known job is planned in stage three.")
    ] = 64,
    gbps: _Gbps = 100.0,
    uplink_gbps: _UplinkGbps = 0.0,
    spines: _Spines = 1,
    by_bytes: _ByBytes = False,
    everything: _Everything = False,
    svg: _Svg = None,
    format: Printed = TextOrJson.text,
) -> int:
    """The plan of a site over all its jobs, kept in DIR: change it, and print what is in force and what happened."""
    from keepstep.service.traffic_planning import SiteChanges, change_site
    from keepstep.traffic.stages import StagePolicy

    _keep_inputs((svg,), (start, *(arrive or ())))
    topology = None if start is None else _topology(start, gbps, uplink_gbps, spines, None)
    changes = SiteChanges(
        topology=topology,
        by_bytes=by_bytes,
        arrive=tuple(arrive or ()),
        leave=tuple(leave or ()),
        down=tuple(down or ()),
        up=tuple(up or ()),
        outcome=outcome,
        everything=everything,
    )
    body, text = change_site(directory, changes, stage=StagePolicy(stage.value, low_priority, large_ranks), svg=svg)
    _print(format, body, text)
    return 0


def published(seeds: _Seeds = 20, format: Printed = TextOrJson.text) -> int:
    """The figures of C4P as the model gives them from the inputs of its test, beside those published."""
    from keepstep.service.traffic_text import published_text
    from keepstep.traffic.published import c4p_figures

    found = c4p_figures(range(seeds))
    _print(format, {"modelled": True, "figures": found}, published_text(found))
    return 0


def _keep_inputs(written: Iterable[Path | None], read: Iterable[Path | None]) -> None:
    """Raises UsageError where a file to be written is one that is read, or two are one."""
    from keepstep.errors import UsageError

    taken = {path.resolve() for path in read if path is not None}
    for path in written:
        if path is not None and path.resolve() in taken:
            raise UsageError("it would be written over", where=str(path), remedy="give another file to write to")
        if path is not None:
            taken.add(path.resolve())


def _topology(path: Path, gbps: float, uplink_gbps: float, spines: int, host_nics: Path | None) -> Any:
    from keepstep.intake.topology_assumed import Assumed
    from keepstep.service.traffic_files import load_topology

    assumed = Assumed(gbps=gbps, uplink_gbps=uplink_gbps, spines=spines)
    return load_topology(path, assumed, host_nics=host_nics)


def _print(format: TextOrJson, body: Any, text: str) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(body), indent=2).decode() if format is TextOrJson.json else text)
