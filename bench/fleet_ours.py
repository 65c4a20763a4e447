"""keepstep's side of the comparison in `fleet_scale.py`: its own modules in one process, from the text to the figures.

Nothing is stored: rows go from the readers to DuckDB in memory, and from there to the account. As JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from keepstep.fleet.account import account_of, ledger_totals
from keepstep.fleet.attempt_arrays import COLUMNS, UNKNOWN, arrays_of
from keepstep.fleet.derived import derive
from keepstep.fleet.ettr_measured import ettr_cells, run_times
from keepstep.fleet.ledger import Assumptions
from keepstep.fleet.node_shares import spread
from keepstep.fleet.rates_by_size import Lives, fleet_rate
from keepstep.fleet.second_order import Losers, second_order
from keepstep.fleet.sizes import SIZES, size_class
from keepstep.fleet.taxonomy import parse_taxonomy
from keepstep.intake.fleet_sources import ReadAs, read_source
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.source_kind import kind_of
from keepstep.records.fleet_schema import TABLES, empty
from keepstep.service.fleet_derive import default_taxonomy
from keepstep.store.fleet_merge import merged

SOURCES = ("sacct.txt", "health.jsonl", "events.txt")


def tables_of(folder: Path) -> dict[str, pa.Table]:
    """The rows of the three files, each once."""
    found: dict[str, list[pa.Table]] = {}
    for name in SOURCES:
        with (folder / name).open("rb") as stream:
            kind = kind_of(stream.read(65536))
            stream.seek(0)
            for piece in read_source(kind, stream, how=ReadAs(where=name, zone="UTC")):
                given = dict(piece.tables) | ({"attempts": piece.attempts} if piece.attempts is not None else {})
                for table, rows in given.items():
                    found.setdefault(table, []).append(rows)
    return {name: merged(name, pa.concat_tables(rows)) for name, rows in found.items()}


def facts_of(tables: dict[str, pa.Table]) -> pa.Table:
    """Causes, runs and preemptions of all attempts, ordered by attempt."""
    connection = duckdb.connect(":memory:", config={"threads": 2})
    connection.execute("SET enable_progress_bar = false")
    tables["attempt_nodes"] = spread(tables["attempts"].select(["attempt_id", "nodes", "gpus"]), expand_hosts)[0]
    for name in TABLES:
        connection.register(name, tables.get(name, empty(name)))
    return derive(connection, parse_taxonomy(default_taxonomy(), where="default"))["attempt_facts"]


def joined(attempts: pa.Table, facts: pa.Table) -> pa.Table:
    """Attempts and their facts side by side."""
    theirs = [name for name in COLUMNS if name not in facts.column_names]
    coded = {
        name: attempts[name].dictionary_encode() if pa.types.is_string(attempts[name].type) else attempts[name]
        for name in theirs
    }
    order = pa.array(np.argsort(attempts["attempt_id"].to_numpy()))
    sides = pa.table(coded).take(order)
    mine = {name: facts[name] for name in COLUMNS if name in facts.column_names}
    return pa.table(mine | {name: sides[name] for name in theirs})


def analyse(folder: Path) -> dict[str, Any]:
    tables = tables_of(folder)
    facts = facts_of(tables)
    seen = arrays_of(joined(tables["attempts"], facts), group="partition")
    account = account_of(seen, Assumptions())
    rng = np.random.default_rng(0)
    lives = Lives(seen.run, seen.gpus, seen.nodes, seen.length, seen.infrastructure & seen.independent)
    rate = fleet_rate(lives)
    times = run_times(seen, account.kept)
    preempted = seen.ended("preempted") | (seen.victim_of != UNKNOWN)
    ids = (seen.attempt, seen.run, seen.gpus, account.lost, seen.infrastructure)
    second = second_order(Losers(*ids, preempted, seen.victim_of, seen.preempted_by), rng=rng)
    cells = ettr_cells(times, size_class(times.gpus), names=SIZES, rng=rng)
    return {
        "runs": len(times.run),
        "rate": [rate.value, rate.low, rate.high],
        "share": second.share,
        "ettr": {cell.group: cell.of_sums for cell in cells},
        "ledger": {label: total / 3.6e9 for label, total in ledger_totals(account).items() if total},
    }


if __name__ == "__main__":
    began = time.process_time()
    figures = analyse(Path(sys.argv[1]))
    print(json.dumps(figures | {"analysis_s": time.process_time() - began}))
