"""Faults drawn from the seed: which, and after how many points that all processes pass together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from keepstep.control.move_state import Move
from keepstep.simulation.engine import Engine
from keepstep.simulation.simulated_disk import SimulatedDisk
from keepstep.simulation.simulated_plane import SimulatedPlane
from keepstep.simulation.simulated_process import Life
from keepstep.simulation.trainee import Trainee

__all__ = ["Aim", "Blow", "Injector", "draw_aims", "draw_blows"]

_KINDS = (("kill", 50), ("segfault", 8), ("freeze", 18), ("cut", 8), ("pair", 8), ("standby", 5), ("damage", 3))


class Blow(msgspec.Struct, frozen=True):
    """After `point` points: a fault of `kind`, to the process that is at that point (`here`) or to any other."""

    point: int
    kind: str
    here: bool
    asleep_s: float


def draw_blows(rng: random.Random, *, points: int, most: int) -> tuple[Blow, ...]:
    """Up to `most` faults within about `points` points; half of them follow close on the one before."""
    blows: list[Blow] = []
    at = 0
    for _ in range(rng.randint(0, most)):
        follows = blows and rng.random() < 0.6
        at = at + rng.randint(0, 60) if follows else rng.randint(0, points)
        kind = rng.choices([name for name, _ in _KINDS], [weight for _, weight in _KINDS])[0]
        asleep_s = rng.choice((0.05, 0.5, 2.0, 1e6))
        blows.append(Blow(at, kind, rng.random() < 0.7, asleep_s))
    return tuple(sorted(blows, key=lambda blow: blow.point))


class Aim(msgspec.Struct, frozen=True):
    """A blow at one that takes part in a move: to its leaver, joiner, a stayer, or who is `here`.

    It falls when so many points were passed in the `stage`: the whole move, from the order to commit on, or from the
    first word of a leaver that committed on.
    """

    point: int
    stage: str
    whom: str
    kind: str
    asleep_s: float


def draw_aims(rng: random.Random) -> tuple[Aim, ...]:
    """Up to three blows at moves, at any stage of them."""
    return tuple(
        Aim(
            point=rng.randint(0, {"move": 120, "commit": 25, "committed": 8}[stage]),
            stage=stage,
            whom=rng.choice(("leaver", "joiner", "stayer", "here")),
            kind=rng.choice(("kill", "kill", "kill", "segfault", "freeze", "cut")),
            asleep_s=rng.choice((0.05, 0.5, 2.0, 1e6)),
        )
        for stage in rng.choices(("move", "commit", "committed"), k=rng.choice((0, 0, 1, 1, 1, 2, 3)))
    )


class Injector:
    """Counts points and strikes. `struck` tells what was done: (kind, name of the process, its rank).

    `late` says that some member had made all steps when a fault struck (news of a broken link take a while: or all
    but one), `early` that one was still in its set-up.
    """

    def __init__(
        self,
        engine: Engine,
        blows: tuple[Blow, ...],
        *,
        trainees: dict[str, Trainee],
        aims: tuple[Aim, ...] = (),
    ) -> None:
        self.struck: list[tuple[str, str, int]] = []
        self.late = False
        self.early = False
        self.on_freeze: Callable[[Life], None] = lambda life: None
        self.move: Callable[[], Move | None] = lambda: None
        self._aims = list(aims)
        self._in_move = {"move": 0, "commit": 0, "committed": 0}
        self._engine = engine
        self._trainees = trainees
        self._blows = list(blows)
        self._points = 0

    def pass_point(self, life: Life, plane: SimulatedPlane, *, disk: SimulatedDisk) -> None:
        """One more point is passed, by `life`."""
        self._points += 1
        while self._blows and self._blows[0].point <= self._points:
            blow = self._blows.pop(0)
            for number, victim in enumerate(self._victims(blow, life)):
                self._strike(blow, victim, plane=plane, disk=disk, number=number)

        move = self.move()
        if move is not None:
            self._pass_in_move(move, life, plane=plane, disk=disk)

    def _pass_in_move(self, move: Move, life: Life, *, plane: SimulatedPlane, disk: SimulatedDisk) -> None:
        reached = {"move": True, "commit": move.committing, "committed": bool(move.committed)}
        self._in_move = {stage: points + reached[stage] for stage, points in self._in_move.items()}
        for aim in tuple(self._aims):
            if aim.point < self._in_move[aim.stage]:
                names = {"leaver": move.leavers, "joiner": move.joiners, "here": {life.name}}.get(aim.whom)
                living = [t for t in self._trainees.values() if t.life.alive and not t.life.frozen and t.rank >= 0]
                apart = move.leavers | move.joiners
                aimed = [t for t in living if (t.life.name not in apart if names is None else t.life.name in names)]
                if aimed:
                    self._aims.remove(aim)
                    self._hit(aim, self._engine.rng.choice(aimed), plane=plane, disk=disk)

    def _hit(self, aim: Aim, victim: Trainee, *, plane: SimulatedPlane, disk: SimulatedDisk) -> None:
        blow = Blow(0, aim.kind, True, aim.asleep_s)
        others = [t for t in self._trainees.values() if t.life.alive and t.rank >= 0 and t is not victim]
        if aim.kind != "cut":
            self._strike(blow, victim, plane=plane, disk=disk, number=0)
        elif others:
            for number, one in enumerate((victim, self._engine.rng.choice(others))):
                self._strike(blow, one, plane=plane, disk=disk, number=number)

    def _victims(self, blow: Blow, life: Life) -> Iterator[Trainee]:
        living = [t for t in self._trainees.values() if t.life.alive and not t.life.frozen]
        members = [t for t in living if t.rank >= 0]
        if blow.kind == "standby":
            yield from [t for t in living if t.rank < 0][:1]
        elif blow.kind in ("pair", "cut"):
            yield from self._engine.rng.sample(members, min(2, len(members)))
        elif blow.here and life.alive:
            yield self._trainees[life.name]
        elif living:
            yield self._engine.rng.choice(living)

    def _strike(self, blow: Blow, victim: Trainee, *, plane: SimulatedPlane, disk: SimulatedDisk, number: int) -> None:
        life = victim.life
        self.struck.append((blow.kind, life.name, victim.rank))
        last = victim.world.script.steps - (blow.kind == "cut")
        machines = [t.machine for t in self._trainees.values() if t.life.alive and t.rank >= 0]
        self.late = self.late or any(m.version >= last for m in machines)
        self.early = self.early or not all(m.whole for m in machines)
        if blow.kind == "freeze":
            life.freeze()
            self.on_freeze(life)
            self._engine.at(blow.asleep_s, life.wake)
        elif blow.kind == "cut":
            if number == 1:
                plane.cut(self.struck[-2][1], life.name)
        elif blow.kind == "damage":
            disk.damage(victim.rank)
        else:
            signal = 11 if blow.kind == "segfault" else 9
            life.end(-signal, signal)
