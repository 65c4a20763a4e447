"""The predicted cost of each domain's loss in words: a table, the worst first."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.records.coverage_records import CoverageRecord, DomainLoss

__all__ = ["coverage_text"]

_MOST_ROWS = 40
_MOST_SPANS = 4
_WORDS = {
    "kept_in_step": "kept in step",
    "steps_recomputed": "steps recomputed",
    "restart": "restart from the beginning",
    "wait": "wait for a machine",
    "stop": "stop",
}
_HEAD = ("if lost", "ranks", "standbys left", "state from", "predicted outcome")


def coverage_text(record: CoverageRecord) -> list[str]:
    """Lines for people; each says by its heading that it is a prediction."""
    rows = [_HEAD, *(_row(loss) for loss in record.domains[:_MOST_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = ["predicted, not measured: what the loss of each domain would cost"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(f"  {'  '.join(cells)}  {row[-1]}")
    if len(record.domains) > _MOST_ROWS:
        lines.append(f"  and {len(record.domains) - _MOST_ROWS} more domains, none of them worse (all in JSON)")
    if record.everywhere:
        lines.append(f"  every node is in {', '.join(record.everywhere)}: no placement on these nodes survives that")
    return lines + [f"  {note}" for note in record.notes]


def _row(loss: DomainLoss) -> tuple[str, ...]:
    sources = ", ".join(f"{source} {len(ranks)}" for source, ranks in sorted(loss.sources.items())) or "-"
    left = str(loss.standbys_left) + (f" + {loss.places_left} places" if loss.places_left else "")
    outcome = _WORDS[loss.outcome]
    if loss.outcome == "steps_recomputed":
        outcome = f"up to {loss.steps_recomputed} {outcome}"
    return loss.domain, _ranks(loss.ranks), left, sources, f"{outcome}: {loss.why}"


def _ranks(ranks: Sequence[int]) -> str:
    """Neighbours as ranges: `0-7,12`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MOST_SPANS]]
    more = sum(last - first + 1 for first, last in spans[_MOST_SPANS:])
    return (",".join(words) or "none") + (f" and {more} more" if more else "")
