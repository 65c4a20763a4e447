"""What the report is computed from: the account of all attempts, and the few rows that need no parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from keepstep.errors import UsageError
from keepstep.fleet.account import Account, Known, account_of, joined_accounts
from keepstep.fleet.attempt_arrays import COLUMNS, arrays_of
from keepstep.fleet.ettr_measured import RunTimes, run_times
from keepstep.fleet.ledger import Assumptions
from keepstep.fleet.rates_by_size import Lives
from keepstep.fleet.sizes import size_class
from keepstep.service.fleet_engine import Engine, Part, each, run_parts
from keepstep.store.fleet_tables import FleetStore

__all__ = ["GROUPS", "FleetData", "ReportOptions", "account_part", "load"]

GROUPS = ("group_key", "account", "user", "qos", "name", "partition", "cluster")
"""Columns that may stand for the user's groups."""

_MINUTE_US = 60_000_000
_KNOWN = """
SELECT f.attempt_id, k.* FROM {table} k
JOIN attempts a ON a.job_id = coalesce(nullif(k.scheduler_job, ''), k.job)
    AND (k.cluster = '' OR a.cluster = k.cluster)
    AND k.{time} >= a.start AND k.{time} <= coalesce(a."end", a.last_seen)
JOIN attempt_facts f ON f.attempt_id = a.attempt_id
WHERE f.run_id % {of} = {number} ORDER BY f.attempt_id, k.{time}
"""


class ReportOptions(msgspec.Struct, frozen=True):
    """What a person may say: minutes between checkpoints, of a start-up, of a checkpoint's pause; the column of groups;
    dates (ISO) of changes; how many nodes and days there were where the tables do not say; the seed of the bootstraps.
    """

    interval_minutes: float = 60.0
    startup_minutes: float = 5.0
    write_minutes: float = 0.0
    group: str = "group_key"
    changes: tuple[str, ...] = ()
    nodes: int | None = None
    days: float | None = None
    seed: int = 0

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions of the ledger, in microseconds."""
        minutes = (self.interval_minutes, self.startup_minutes, self.write_minutes)
        return Assumptions(*(round(value * _MINUTE_US) for value in minutes))


class FleetData(msgspec.Struct, frozen=True):
    """Everything the sections look at. `first` and `last` bound what attempts were seen [us]; equal: there are none."""

    store: FleetStore
    options: ReportOptions
    account: Account
    times: RunTimes
    first: int
    last: int
    connection: Any

    def rows(self, text: str) -> pa.Table:
        """The answer to one SQL query over the tables."""
        return self.connection.sql(text).to_arrow_table()

    def rng(self, section: int) -> np.random.Generator:
        """A generator of its own for each section, so that none depends on what ran before it."""
        return np.random.default_rng([self.options.seed, section])

    @property
    def lives(self) -> Lives:
        """The attempts as exposure and events."""
        seen = self.account.attempts
        return Lives(seen.run, seen.gpus, seen.nodes, seen.length, seen.infrastructure & seen.independent)

    @property
    def sizes(self) -> Any:
        """The class of size of each run."""
        return size_class(self.times.gpus)


def account_part(directory: Path, chosen: tuple[Part, ReportOptions]) -> Account:
    """The account of the job runs of one part."""
    store = FleetStore(directory)
    part, options = chosen
    wanted = (*COLUMNS, options.group) if options.group not in COLUMNS else COLUMNS
    table = store.part(part[0], of=part[1], columns=wanted)
    known = _known(store, number=part[0], of=part[1])
    return account_of(arrays_of(table, group=options.group), options.assumptions, known=known)


def _known(store: FleetStore, *, number: int, of: int) -> Known | None:
    if not store.rows("progress") and not store.rows("incidents"):
        return None
    texts = (_KNOWN.format(table=table, time=time, of=of, number=number) for table, time in _JOINED)
    connection = store.connection(spill=True)
    return Known(*(connection.sql(text).to_arrow_table() for text in texts))


_JOINED = (("progress", '"time"'), ("incidents", "onset"))


def load(
    directory: Path,
    options: ReportOptions,
    *,
    engine: Engine = "local",
    parts: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> FleetData:
    """Read the directory in `parts` (None: as many as its size asks for), each worked on by itself; `say` is told.

    Raises UsageError if it is no fleet directory or a wrong group, StoreError if a table is damaged.
    """
    if options.group not in GROUPS:
        raise UsageError(f"no column of groups: {options.group[:40]}", remedy=f"one of {', '.join(GROUPS)}")
    store = FleetStore(directory)
    divided = run_parts(directory) if parts is None else [(number, parts) for number in range(parts)]
    done = each(account_part, [(part, options) for part in divided], directory=directory, engine=engine, say=say)
    account = joined_accounts(done)
    del done
    seen = account.attempts
    low, high = (int(seen.start.min()), int(seen.end.max())) if len(seen.start) else (0, 0)
    times = run_times(seen, account.kept)
    return FleetData(store, options, account, times, low, high, store.connection(spill=True))
