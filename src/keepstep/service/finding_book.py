"""The findings of one job by number: once in the journal, again when one changes, and once more when it has passed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from keepstep.control.job_state import JobState
from keepstep.records.events import Finding
from keepstep.records.finding import QUIET, Layer
from keepstep.records.finding_words import one_line
from keepstep.service.analysis_wire import Standing
from keepstep.service.bundles import BUNDLES_FOLDER, Bundles
from keepstep.service.clock import Clock
from keepstep.service.keeper import Keeper

__all__ = ["FindingBook"]

_MOST_FINDINGS = 10_000
_SHOWN = 3
_log = logging.getLogger(__name__)


class FindingBook:
    """Numbers, journals and tells findings. `open` are those that stand, by key; `state()` is that of the job."""

    def __init__(
        self,
        keeper: Keeper,
        state: Callable[[], JobState],
        *,
        bundles: Bundles,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """`say` takes a line for people. Numbers go on behind those of an earlier controller."""
        self.open: dict[str, Finding] = {}
        self._keeper = keeper
        self._state = state
        self._bundles = bundles
        self._clock = clock
        self._say = say
        self._told = {f.number: f for f in keeper.events if isinstance(f, Finding) and f.number}
        self._count = max(self._told, default=0)
        self._notes: dict[str, tuple[str, Layer | None]] = {}

    def numbered(self, number: int) -> Finding | None:
        """The last word on finding `number`, also if it has ended."""
        return self._told.get(number)

    def words(self) -> str:
        """What stands now, for the progress line; empty if nothing does."""
        standing = [finding for finding in self.open.values() if finding.kind not in QUIET]
        return "; ".join(f"finding {finding.number}: {one_line(finding)}" for finding in standing[:_SHOWN])

    def enter(self, standing: Standing) -> bool:
        """Take news of a finding; True if it is a new one, or one that was no alarm before.

        One that ends and comes again gets another number. With a finding ends what a probe made of it.
        """
        known = self.open.get(standing.key)
        if known is None and (standing.status == "ended" or self._count >= _MOST_FINDINGS):
            return False
        if known is not None and standing.status == "new":  # a new analysis says again what stands
            standing = msgspec.structs.replace(standing, status="updated")
        if known is None:
            self._count += 1
            standing = msgspec.structs.replace(standing, status="new")
        finding = self._journalled(standing, known.number if known is not None else self._count)
        if standing.status == "ended":
            del self.open[standing.key]
            self._notes.pop(standing.key, None)
            self._tell(finding, f"finding {finding.number} has ended: {one_line(finding)}")
            for key in [key for key, other in self.open.items() if other.refers == finding.number]:
                self.end(key, f"finding {finding.number}, which it narrows, has ended")
            return False
        self.open[standing.key] = finding
        fresh = known is None or (known.kind in QUIET and finding.kind not in QUIET)
        if fresh:
            self._tell(finding, f"finding {finding.number}: {one_line(finding)}")
        elif finding.kind in QUIET and known is not None and known.kind not in QUIET:
            self._say(f"finding {finding.number} is no alarm any more: {one_line(finding)}")
        return fresh

    def end_left(self) -> None:
        """What an earlier controller left standing has ended with it: nobody looks whether it passes.

        What still holds is found again, under another number.
        """
        for finding in [told for told in self._told.values() if told.status != "ended"]:
            why = "ended: another controller took over; what still holds is found again"
            left = msgspec.structs.replace(finding, evidence=(*finding.evidence, why))
            ended = self._journalled(Standing("", "ended", left), finding.number)
            self._tell(ended, f"finding {ended.number} has ended with its controller: {one_line(ended)}")

    def end(self, key: str, why: str) -> None:
        """The finding of that key, if it stands, has passed."""
        if (finding := self.open.get(key)) is not None:
            ended = msgspec.structs.replace(finding, evidence=(*finding.evidence, f"ended: {why}"))
            self.enter(Standing(key, "ended", ended))

    def note(self, key: str, words: str, *, layer: Layer | None) -> None:
        """Add what a check saw to a finding that stands: to this word on it and to all later ones."""
        if self._notes.get(key) != (words, layer):
            self._notes[key] = (words, layer)
            self._say(words)
            self.enter(Standing(key, "updated", self.open[key]))

    def _journalled(self, standing: Standing, number: int) -> Finding:
        state = self._state()
        finding = standing.finding
        if (noted := self._notes.get(standing.key)) is not None and noted[0] not in finding.evidence:
            finding = msgspec.structs.replace(
                finding, evidence=(*finding.evidence, noted[0]), layer=noted[1] or finding.layer
            )
        bundle = "" if finding.kind in QUIET else f"{BUNDLES_FOLDER}/{number}"
        finding = msgspec.structs.replace(
            finding,
            job=state.spec.job,
            attempt=state.attempt,
            generation=state.generation,
            wall=self._clock.wall(),
            number=number,
            status=standing.status,
            bundle=bundle,
        )
        self._keeper.keep(finding, durable=True)
        self._told[number] = finding
        if bundle:
            self._bundles.put_finding(finding)
        return finding

    def _tell(self, finding: Finding, text: str) -> None:
        if finding.kind in QUIET:
            _log.debug("%s", text)
        else:
            self._say(text)
