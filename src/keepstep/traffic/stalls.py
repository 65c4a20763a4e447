"""Links of one membership that carry nothing though a collective waits for them, and what that asks for.

A dead way stalls whatever happened to take it, planned or not. Connections that are made while it is dead do not take
it: nobody answers there. So only a way that died since the links were made can hold one of them up.
"""

from __future__ import annotations

from collections.abc import Callable, Set

__all__ = ["Stalls"]

_FRESH_S = 1.0
_FIRST_S, _LONGEST_S = 1.0, 32.0

_Pair = tuple[int, int]


class Stalls:
    """What members told of stalled links, as (from, to) rank; `now` in seconds."""

    def __init__(self) -> None:
        self._told: dict[_Pair, float] = {}
        self._wait_s, self._next = _FIRST_S, 0.0
        self._known: set[str] | None = None
        self._died: set[str] = set()
        self._cut = False

    def tell(self, pair: _Pair, now: float) -> None:
        """Nothing passes from one rank to the other."""
        self._told[pair] = now

    def drop(self) -> None:
        """What was told so far is answered."""
        self._told = {}

    def take_dead(self, links: Set[str]) -> None:
        """These links are dead, as a probe of all ways has just shown; at first since before the connections stood."""
        self._known = set(links) if self._known is None else self._known & links
        died = set(links) - self._known
        if died - self._died:
            self._cut = False
        self._died = died

    def plan_changed(self) -> None:
        """A new plan is about to be made real: it may be held up once more."""
        self._cut = False

    def probed(self, *, useful: bool) -> None:
        """A probe because of a stall changed something or not; the next one comes later where nothing came of it."""
        self._wait_s = _FIRST_S if useful else min(2 * self._wait_s, _LONGEST_S)

    def due(self, now: float) -> bool:
        """Whether a stall asks for a probe of all ways."""
        due = bool(self._standing(now)) and now >= self._next
        self._told = {}
        if due:
            self._next = now + self._wait_s
        return due

    def to_cut(self, now: float) -> _Pair | None:
        """A stalled link for whose sake the step is to be cut, so that a plan can come into force; once a plan."""
        standing = self._standing(now)
        if self._cut or not standing:
            return None
        self._cut = True
        return standing[0]

    def left_out(self, now: float, *, apart: Callable[[_Pair], bool]) -> _Pair | None:
        """As `to_cut`, for a link between leaves (`apart`) that no plan moves, after a way between leaves has died."""
        return self.to_cut(now) if self._died and any(map(apart, self._standing(now))) else None

    def _standing(self, now: float) -> list[_Pair]:
        return sorted(pair for pair, at in self._told.items() if now - at < _FRESH_S)
