"""Section of the report about what it rests on: sources, what was left out of them, and what is odd in the rest."""

from __future__ import annotations

import collections

from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, sheet

__all__ = ["sources_section"]

_MOST = 30
_ASIDE = """
SELECT reason, count(*) AS rows, min(excerpt) AS example FROM kept_aside
GROUP BY reason ORDER BY rows DESC, reason LIMIT {most}
"""
_ODD = """
SELECT time_note, count(*) AS attempts FROM attempts WHERE time_note <> ''
GROUP BY time_note ORDER BY attempts DESC, time_note LIMIT {most}
"""
_SUMMARIES = "SELECT cluster, figure, value FROM summaries ORDER BY cluster, figure"


def sources_section(data: FleetData) -> Section:
    """Which files, how many rows, what was kept aside and why, which times are odd, which figures came ready-made."""
    sources = data.store.manifest.sources
    seen = data.account.attempts
    aside = sum(source.kept_aside for source in sources)
    words: tuple[str, ...] = (
        f"{len(sources)} sources; {len(seen.run):,} attempts on GPUs in {len(data.times.run):,} runs; {aside:,} rows "
        f"kept aside because they were not understood",
        f"{seen.left_out:,} attempts without a start, an end or a number of GPUs are in no figure; {seen.turned:,} "
        f"that ended before they began count with length 0",
    )
    refused = data.store.manifest.refused
    if refused:
        words += (f"{len(refused)} files that were given to the import are in no figure: nothing was taken of them",)
    files = [
        {"path": source.path, "kind": source.kind, "rows": sum(source.rows.values()), "kept_aside": source.kept_aside}
        | {"bad_bytes": source.bad_bytes}
        for source in sources
    ]
    noted = collections.Counter(note for source in sources for note in source.notes)
    notes = [{"sources": count, "note": note} for note, count in noted.most_common(_MOST)]
    return Section(
        "sources",
        "What this rests on",
        words,
        (
            sheet(
                "sources", "Sources", rows=files[:_MOST], note="" if len(files) <= _MOST else f"{_MOST} of {len(files)}"
            ),
            sheet(
                "not_taken",
                "Not taken",
                rows=[{"path": one.path, "reason": one.reason} for one in refused[:_MOST]],
                note="" if len(refused) <= _MOST else f"{_MOST} of {len(refused)}",
            ),
            sheet("notes", "Notes of the readers", rows=notes),
            sheet("kept_aside", "Kept aside", rows=data.rows(_ASIDE.format(most=_MOST)).to_pylist()),
            sheet("odd_times", "Odd times", rows=data.rows(_ODD.format(most=_MOST)).to_pylist()),
            sheet("summaries", "Figures published by others", rows=data.rows(_SUMMARIES).to_pylist()),
        ),
    )
