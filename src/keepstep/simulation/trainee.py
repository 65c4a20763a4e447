"""What a training process does, as `training.guard` and `training.user_job` do it, with the real member machine.

State is a hash chain instead of weights: state[v+1] = H(state[v], what all ranks gave), and what a rank gives depends
on its own random state and data position. A wrong byte anywhere shows in every later state.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from keepstep.control.member import (
    Act,
    LeaveJob,
    ListCheckpoints,
    LoadCheckpoint,
    MemberState,
    Place,
    Resolve,
    RunOn,
    Say,
    ShowMirrors,
    TakeState,
    TellSettled,
    at_boundary,
    obey,
    step_kept,
)
from keepstep.control.member_moves import must_wait
from keepstep.records.messages import (
    Address,
    Checkpoints,
    Fetch,
    Fetched,
    FetchFailed,
    Finished,
    Hello,
    Order,
    PeerLostReport,
    Ready,
    ScriptFailed,
    Settled,
    Stop,
    Welcome,
)
from keepstep.records.mirror_messages import Mirrors
from keepstep.simulation.engine import Engine
from keepstep.simulation.simulated_disk import Part, SimulatedDisk
from keepstep.simulation.simulated_move import Habits, MovingPart
from keepstep.simulation.simulated_plane import SimulatedFabric, SimulatedPlane
from keepstep.simulation.simulated_process import Exit, Life, Pause, Program
from keepstep.simulation.truth import Truth, digest_of

__all__ = ["VERSION", "Script", "Surroundings", "Trainee"]

VERSION = "1.0"


class Script(msgspec.Struct, frozen=True):
    """The user's program: `steps` updates, a checkpoint after each `every` (0: none).

    `raises` and `crashes` are (rank, step): an exception with exit code 3, or a SIGSEGV, whenever that is reached.
    `habits` is how it behaves in a planned move.
    """

    steps: int
    every: int = 0
    raises: tuple[int, int] | None = None
    crashes: tuple[int, int] | None = None
    habits: Habits = Habits()


class Surroundings(msgspec.Struct):
    """What all processes share. `trainees` are all that ever were, by name."""

    engine: Engine
    plane: SimulatedPlane
    disk: SimulatedDisk
    truth: Truth
    script: Script
    trainees: dict[str, Trainee]


class Trainee:
    """The program of one process. `state` and `private` are what a checkpoint would hold."""

    def __init__(self, world: Surroundings, life: Life, *, rank: int) -> None:
        self.world = world
        self.life = life
        self.rank = rank
        self.state = ""
        self.private = ""
        self.image: str | None = None
        self.finished = False
        self.machine = MemberState(rank=rank, generation=0)
        self.fabric = SimulatedFabric(world.plane, life.name, rank=rank, generation=0)
        self.moving = MovingPart(
            world.engine, self, others=lambda name: world.trainees[name].moving, habits=world.script.habits
        )
        self._words = ""
        self._chance = world.engine.rng

    # ------------------------------------------------------------ becoming a member

    def run(self) -> Program:
        """From the start of the process to its end."""
        yield from self.life.sleep(self._about(0.3), "importing")
        name, layout = self.life.name, self.world.truth.layout
        address = Address(name, self.life.node, name, self.life.node, 1)
        self.life.said_hello = True
        self.life.say(Hello(name, self.rank, layout.world, 1, address, VERSION, "2"))
        order = yield from self._next_order("waiting for a role")
        if not isinstance(order, Welcome):
            raise Exit(order.code if isinstance(order, Stop) else 76)
        self._enter(order)
        yield from self._set_up()
        if order.joiner:
            yield from self.life.sleep(self._about(0.05), "rehearsing")
        while True:
            yield from self._boundary()
            if self.machine.version < self.world.script.steps:
                yield from self._step()
            elif (yield from self._agreement("finish")):
                break
        yield from self._finish()

    def _enter(self, order: Welcome) -> None:
        self.rank = order.rank
        asks = order.joiner or order.attempt > 0 or self.world.script.every > 0
        self.machine = MemberState(order.rank, order.generation, epoch=order.epoch, joiner=asks)
        self.fabric.rank, self.fabric.generation = order.rank, order.generation
        self.fabric.local = order.joiner
        self.fabric.wake = self.life.resume
        self.fabric.on_loss = lambda rank: self.life.say(PeerLostReport(self.fabric.generation, rank))
        self.life.on_poison = self.fabric.poison
        self.life.on_move = self.moving.take
        self.world.plane.join(self.fabric)
        if not order.joiner:
            self.fabric.roster = {rank: address.member for rank, address in order.roster.items()}
            self.world.plane.look_for_dead(self.fabric)

    def _set_up(self) -> Program:
        """Every process draws its own numbers; then rank 0's are handed to all (in a joiner: its own)."""
        yield from self.life.sleep(self._about(0.05), "set-up")
        own = self.world.truth.base(self.rank)
        base = own if self.fabric.local else (yield from self._collective("broadcast", own))
        self.state = self.world.truth.layout.initial_state(base, self.rank)
        self.private = self.world.truth.private(self.rank, 0)

    def _finish(self) -> Program:
        self._check("finished")
        self.finished = True
        self.life.say(Finished(self.machine.version, self.state))
        yield from self.life.sleep(self._about(0.02), "finished")
        self.world.plane.leave(self.fabric)

    # ------------------------------------------------------------ the step

    def _step(self) -> Program:
        kept = (self.state, self.private)
        self._words = ""
        number = self.machine.version
        truth, script = self.world.truth, self.world.script
        yield from self.life.sleep(self._about(0.01), "computing")
        given = truth.layout.gradient(self.state, self.private, rank=self.rank)
        reduced = yield from self._collective("reduce", given)
        if script.crashes == (self.rank, number) and not self.fabric.poisoned:
            self.life.end(-11, 11)
            yield from self.life.sleep(0.0, "crashed")
        if script.raises == (self.rank, number) and not self.fabric.poisoned:
            self.life.say(ScriptFailed(number, "ValueError: bad luck"))
            yield from self.life.sleep(self._about(0.01), "failing")
            raise Exit(3)
        if self.fabric.poisoned and self._chance.random() < 0.1:
            yield from self._park()
            self.state, self.private = kept
            return
        self._publish(number + 1, truth.private(self.rank, number + 1))
        if not (yield from self._agreement("agree")) and not (yield from self._park()):
            self.state, self.private = kept
            return
        yield from self.life.sleep(self._about(0.002), "updating")
        self.state = truth.layout.updated(self.state, reduced)
        self.private = truth.private(self.rank, number + 1)
        yield from self.life.sleep(self._about(0.0005), "updated")
        yield from self._kept()
        yield from self.moving.commit(self._words, self._vote)

    def _kept(self) -> Program:
        self.machine, act = step_kept(self.machine)
        self._check("kept")
        self._publish(self.machine.version, self.private)
        if act is not None:
            yield from self._do(act)
        every = self.world.script.every
        if every and self.machine.version % every == 0:
            self._save(self.machine.version)

    def _save(self, version: int) -> None:
        part, rank = Part(self.state, self.private), self.rank

        def written() -> None:
            torn = msgspec.structs.replace(part, whole=False)
            self.world.disk.write(rank, version, part=part if self.life.alive else torn)

        self.world.engine.at(self._about(0.02), lambda: self.life.when_awake(written) if self.life.alive else written())

    def _collective(self, kind: str, given: str) -> Generator[Pause, None, str]:
        """The result, or unspecified data where the plane is poisoned."""
        if not self.fabric.poisoned:
            sequence = self.fabric.call(kind, given, step=self.machine.version)
            yield from self.life.wait(lambda: self.fabric.poisoned or sequence in self.fabric.results, kind)
            if sequence in self.fabric.results:
                return self.fabric.results[sequence]
        return digest_of("garbage", self._chance.random())

    def _agreement(self, kind: str) -> Generator[Pause, None, bool]:
        if self.fabric.poisoned or self.fabric.local:
            return False
        word = self.moving.word() if kind == "agree" else ""
        sequence = self.fabric.call(kind, word, step=self.machine.version)
        yield from self.life.wait(lambda: self.fabric.poisoned or sequence in self.fabric.results, kind)
        passed = sequence in self.fabric.results
        if passed:
            self._words = self.fabric.results[sequence]
            yield from self.life.sleep(0.0, "agreed")
        return passed

    def _vote(self, given: str) -> Program:
        if not self.fabric.poisoned:
            yield from self._collective("vote", given)

    def took_over(self) -> None:
        """The state of a leaver is this process's own now."""
        self._check("took over")
        self._publish(self.machine.version, self.private)

    # ------------------------------------------------------------ the machine

    def _boundary(self) -> Program:
        self.machine, act = at_boundary(self.machine)
        if act is not None:
            yield from self._do(act)
        while self.fabric.poisoned or must_wait(self.machine) or self.life.orders:
            if self.moving.may_take():
                yield from self.moving.take_rank()
                continue
            yield from self.life.wait(lambda: bool(self.life.orders) or self.moving.may_take(), "boundary")
            if not self.life.orders:
                continue
            order = self.life.orders.popleft()
            self.machine, act = obey(self.machine, order, place=Place.BOUNDARY)
            yield from self._do(act)

    def _park(self) -> Generator[Pause, None, bool]:
        while True:
            order = yield from self._next_order("parked")
            self.machine, act = obey(self.machine, order, place=Place.AGREEMENT)
            if isinstance(act, Resolve):
                return act.forward
            yield from self._do(act)

    def _next_order(self, point: str) -> Generator[Pause, None, Order]:
        yield from self.life.wait(lambda: bool(self.life.orders), point)
        return self.life.orders.popleft()

    def _do(self, act: Act) -> Program:
        replica = self.world.truth.layout.replica(self.rank)
        if isinstance(act, Say):
            fact = act.fact
            self.life.say(Ready(fact.generation, replica) if isinstance(fact, Ready) else fact)
        elif isinstance(act, TellSettled):
            self._settle(act)
        elif isinstance(act, TakeState):
            yield from self._take(act.order)
        elif isinstance(act, ShowMirrors):
            self.life.say(Mirrors(act.order.generation))
        elif isinstance(act, ListCheckpoints):
            self.life.say(Checkpoints(act.generation, *self.world.disk.valid(self.rank)))
        elif isinstance(act, LoadCheckpoint):
            yield from self._load(act)
        elif isinstance(act, RunOn):
            self._run_on(act)
        elif isinstance(act, LeaveJob):
            if self.machine.leaving:
                self.world.plane.leave(self.fabric)
            raise Exit(act.code)
        yield from self.life.sleep(self._about(0.0003), type(act).__name__)

    def _settle(self, act: TellSettled) -> None:
        self.image = self.state
        replica = self.world.truth.layout.replica(self.rank)
        self.life.say(Settled(act.generation, act.version, digest_of(self.state), replica))

    def _take(self, order: Fetch) -> Program:
        """Copy from whoever of the sources still stands there when the bytes have come."""
        yield from self.life.sleep(self._about(0.02), "fetching")
        for rank in order.sources:
            source = self.world.trainees[order.roster[rank].member]
            answers = source.life.alive and not source.life.frozen
            if answers and source.image is not None and digest_of(source.image) == order.digest:
                self.state = source.image
                self.private = order.private.decode() or self.private
                self.life.say(Fetched(order.generation, order.version, order.digest, 100))
                return
        self.life.say(FetchFailed(order.generation, order.sources, "no source is left"))

    def _load(self, act: LoadCheckpoint) -> Program:
        self.image = None
        yield from self.life.sleep(self._about(0.02), "loading")
        if act.version >= 0:
            part = self.world.disk.read(self.rank, act.version)
            if part is None:
                raise Exit(1)
            self.state, self.private = part.state, part.private
        self._settle(TellSettled(act.generation, max(act.version, 0)))

    def _run_on(self, act: RunOn) -> None:
        self.image = None
        self.moving.clear()
        roster = {rank: address.member for rank, address in act.order.roster.items()}
        self.fabric.install(act.order.generation, roster)
        self._check("runs on")
        self._publish(self.machine.version, self.private)

    # ------------------------------------------------------------ inside

    def _publish(self, version: int, private: str) -> None:
        """Three versions survive the process, as in the recorder's memory."""
        self.life.published = {v: p for v, p in self.life.published.items() if v % 3 != version % 3} | {
            version: private
        }

    def _check(self, where: str) -> None:
        self.world.truth.check_state(
            self.rank, self.machine.version, state=self.state, private=self.private, where=f"{self.life.name} {where}"
        )

    def _about(self, mean_s: float) -> float:
        return self.world.engine.delay(mean_s)
