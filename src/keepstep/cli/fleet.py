"""Commands about a fleet: import what its tools wrote, ask questions of it, report on it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.options import Printed, TextOrJson

__all__ = ["Engine", "Fleet", "Pages", "Rows", "add_to", "fleet", "import_", "query", "report", "taxonomy"]

fleet = typer.Typer(help="Account for the GPU-hours of a fleet.", no_args_is_help=True)

Fleet = Annotated[Path, typer.Argument(metavar="DIR", help="Fleet directory, made by `keepstep fleet import`.")]


class Rows(StrEnum):
    """How rows are printed."""

    text = "text"
    json = "json"
    csv = "csv"


class Pages(StrEnum):
    """How a report is printed."""

    text = "text"
    json = "json"
    html = "html"


class Engine(StrEnum):
    """Who works on the parts of a report."""

    local = "local"
    ray = "ray"


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    fleet.command("import")(import_)
    fleet.command()(query)
    fleet.command()(report)
    fleet.command()(taxonomy)
    app.add_typer(fleet, name="fleet")


def import_(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Files, run directories, directories.")],
    into: Annotated[Path, typer.Option(metavar="DIR", help="Fleet directory; made if it is not there.")],
    timezone: Annotated[str, typer.Option(help="Zone of times that name none, e.g. Europe/Berlin [UTC].")] = "",
    cluster: Annotated[str, typer.Option(help="Name of the cluster where a source does not say it.")] = "",
    node: Annotated[str, typer.Option(help="Node of a health snapshot that does not say it.")] = "",
    at: Annotated[str, typer.Option(help="Time of a health snapshot, ISO 8601 with offset.")] = "",
    good: Annotated[Path | None, typer.Option(help="Snapshot of a good node to compare snapshots with.")] = None,
    format: Printed = TextOrJson.text,
) -> int:
    """Read what other tools wrote into tables; what is there already is not added again.

    Exit code 65 if no source could be read.
    """
    from keepstep.service.fleet_import import import_sources, reading_of, summary_text

    reading = reading_of(timezone=timezone, cluster=cluster, node=node, at=at, good=good)
    summary = import_sources(sources, into, reading=reading, say=lambda line: print(line, file=sys.stderr))
    print(summary_text(summary, json=format is TextOrJson.json))
    return 65 if all(source.failed for source in summary.sources) else 0


def query(
    directory: Fleet,
    sql: Annotated[str, typer.Argument(help="One SELECT over the tables.")] = "",
    incident: Annotated[str, typer.Option(help="incident_id, JOB:NUMBER or the id of a failed job.")] = "",
    incidents: Annotated[bool, typer.Option("--incidents", help="List what --incident can be asked about.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 1000,
    format: Annotated[Rows, typer.Option("--format", help="text, json or csv.")] = Rows.text,
) -> int:
    """Answer SQL, or tell the story of one incident: what waited, who had finished, which path, what came next."""
    from keepstep.errors import UsageError
    from keepstep.service.fleet_query import answer_text, incident_answer, incident_list, sql_answer, story_answer

    if sum((bool(sql), bool(incident), incidents)) != 1:
        raise UsageError("one of: SQL, --incident, --incidents", remedy="keepstep fleet query DIR 'SHOW TABLES'")
    if incident:
        print(story_answer(incident_answer(directory, incident), style=format.value))
    else:
        answer = incident_list(directory) if incidents else sql_answer(directory, sql, limit=limit)
        print(answer_text(answer, style=format.value))
    return 0


def report(
    directory: Fleet,
    format: Annotated[Pages, typer.Option("--format", help="text, json or html (one file with charts).")] = Pages.text,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="Assumed time between checkpoints.")] = 60.0,
    startup_minutes: Annotated[float, typer.Option(help="Assumed time from start to first step.")] = 5.0,
    write_minutes: Annotated[float, typer.Option(help="Assumed pause of a checkpoint.")] = 0.0,
    group: Annotated[
        str, typer.Option(help="Column that is the user's group: group_key, account, user ...")
    ] = "group_key",
    change: Annotated[list[str] | None, typer.Option(metavar="DATE", help="Compare the rate before and after.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes there were, if no source says it.")] = None,
    days: Annotated[float | None, typer.Option(min=0.001, help="Days observed, if no source says it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstraps.")] = 0,
    engine: Annotated[Engine, typer.Option(help="local, or ray for logs that outgrow one machine.")] = Engine.local,
) -> int:
    """Account for the GPU-hours: ledger, ETTR, failure rates, losses, lemons, queue, comparisons."""
    from keepstep.errors import UsageError
    from keepstep.service.fleet_report import ReportOptions, printed_report, write_page

    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError("cannot be written: no such directory", where=str(out))
    options = ReportOptions(
        interval_minutes=checkpoint_minutes,
        startup_minutes=startup_minutes,
        write_minutes=write_minutes,
        group=group,
        changes=tuple(change or ()),
        nodes=nodes,
        days=days,
        seed=seed,
    )
    printed = printed_report(
        directory,
        options,
        style=format.value,
        engine=engine.value,
        terminal=out is None,
        say=lambda line: print(line, file=sys.stderr),
    )
    if out is None:
        print(printed)
    else:
        write_page(out, printed)
    return 0


def taxonomy(directory: Fleet) -> int:
    """Derive causes and job runs again, with the taxonomy.toml in the directory (after it was edited)."""
    from keepstep.service.fleet_derive import derive_again, site_taxonomy
    from keepstep.store.fleet_tables import FleetStore

    FleetStore(directory)
    chosen, _ = site_taxonomy(directory)
    for note in derive_again(directory):
        print(note)
    print(f"taxonomy {chosen.version}: {len(chosen.causes)} causes")
    return 0
