"""The whole control plane in one seeded world: controller, agents, processes, network and faults."""

from __future__ import annotations

import random
from functools import partial

import msgspec

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Decision, Directed, Event, JobSpec, StopRequest, Tick
from keepstep.control.move_plan import plan_move
from keepstep.control.roster import Status, live
from keepstep.errors import UsageError
from keepstep.records.events import Finding, Incident
from keepstep.records.messages import AgentHello, Fact, Fence, Order, StartMember
from keepstep.records.moves import MoveRecord, MoveRequest
from keepstep.simulation.engine import Channel, Engine
from keepstep.simulation.faults import Aim, Blow, Injector, draw_aims, draw_blows
from keepstep.simulation.simulated_agent import SimulatedAgent
from keepstep.simulation.simulated_disk import SimulatedDisk
from keepstep.simulation.simulated_move import Habits
from keepstep.simulation.simulated_plane import SimulatedPlane
from keepstep.simulation.simulated_process import Life
from keepstep.simulation.trainee import VERSION, Script, Surroundings, Trainee
from keepstep.simulation.truth import Layout, Truth, Violation

__all__ = ["Plan", "Wish", "World", "draw_plan"]

_TICK_S = 0.1
_WIRE_S = 0.001
_PATIENCE_S = 20.0


class Wish(msgspec.Struct, frozen=True):
    """At `at_s` a person wants `ranks` moved `to` a node."""

    at_s: float
    ranks: tuple[int, ...]
    to: str


class Plan(msgspec.Struct, frozen=True):
    """What one run is about; all of it follows from the seed.

    `nodes` are (name, ranks, standbys); `start_fails` is the number of the process that cannot be started (-1: all
    can), `stop_s` when a person ends the job (0: never). `moves` are wanted, `aims` are blows at them.
    """

    seed: int
    layout: Layout
    nodes: tuple[tuple[str, int, int], ...]
    script: Script
    max_restarts: int
    blows: tuple[Blow, ...]
    start_fails: int = -1
    stop_s: float = 0.0
    moves: tuple[Wish, ...] = ()
    aims: tuple[Aim, ...] = ()


def draw_plan(seed: int) -> Plan:
    """A job and its faults. Every third job has state without a replica, every third writes checkpoints."""
    rng = random.Random(seed)
    world = rng.randint(1, 6)
    shards = rng.choice((1, 1, 2, world))
    shards = min(shards, world)
    steps = rng.randint(1, 12)
    every = rng.choice((0, 0, rng.randint(1, 4))) if shards < world else rng.choice((0, 1, 3))
    fault = rng.random()
    which = (rng.randrange(world), rng.randrange(steps))
    script = Script(steps, every, which if fault < 0.04 else None, which if 0.04 <= fault < 0.08 else None)
    first = rng.randint(1, world)
    standbys = rng.choice((0, 1, 1, 2, 3))
    nodes = (("n0", first, standbys),) if first == world else (("n0", first, standbys), ("n1", world - first, 1))
    moves, aims, habits, more = _draw_moves(random.Random(f"{seed} moves"), world=world, nodes=[n[0] for n in nodes])
    script = msgspec.structs.replace(script, steps=steps + more, habits=habits)
    points = world * (steps + more + 2) * 9
    blows = draw_blows(rng, points=points, most=5)
    start_fails = rng.randrange(world + 3) if rng.random() < 0.05 else -1
    stop_s = rng.uniform(0.0, 2.0) if rng.random() < 0.05 else 0.0
    return Plan(seed, Layout(world, shards), nodes, script, 3, blows, start_fails, stop_s, moves, aims)


def _draw_moves(
    rng: random.Random, *, world: int, nodes: list[str]
) -> tuple[tuple[Wish, ...], tuple[Aim, ...], Habits, int]:
    """What half of the jobs have besides: moves, blows at them, members that refuse, and steps enough for it."""
    if rng.random() < 0.5:
        return (), (), Habits(), 0
    wishes = []
    at_s = 0.45
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s += rng.uniform(0.0, 0.6)
        ranks = tuple(rng.sample(range(world), min(world, rng.choice((1, 1, 1, 2, 3)))))
        wishes.append(Wish(at_s, ranks, rng.choice(("", "", *nodes))))
    habits = Habits(rng.choice((0.0, 0.0, 0.1)), rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.5, 1.0)))
    return tuple(wishes), draw_aims(rng), habits, rng.randint(20, 60)


class World:
    """One run. After `run()`: `state`, `incidents`, `findings`, `journal` (decisions in order) and the trainees."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = Engine(plan.seed)
        self.truth = Truth(plan.layout)
        self.incidents: list[Incident] = []
        self.findings: list[Finding] = []
        self.journal: list[tuple[float, Event, Decision]] = []
        spec = JobSpec("sim", plan.layout.world, len(plan.nodes), VERSION, b"s", plan.max_restarts, _PATIENCE_S)
        self.state = new_job(spec, epoch=1)
        plane = SimulatedPlane(self.engine, self.truth, world=plan.layout.world)
        plane.when_awake = lambda name, action: self._around.trainees[name].life.when_awake(action)
        self._around = Surroundings(self.engine, plane, SimulatedDisk(3), self.truth, plan.script, {})
        self.moves: list[MoveRecord] = []
        self.injector = Injector(self.engine, plan.blows, trainees=self.trainees, aims=plan.aims)
        self.injector.move = lambda: self.state.move
        self._agents = {name: self._agent(name) for name, _, _ in plan.nodes}
        self._down = {name: Channel(self.engine, _WIRE_S) for name in self._agents}
        self.injector.on_freeze = lambda life: self._agents[life.node].watch_frozen(life)

    @property
    def trainees(self) -> dict[str, Trainee]:
        """All processes that ever were, by name."""
        return self._around.trainees

    def run(self, *, until_s: float = 600.0) -> bool:
        """True if the job came to its end within `until_s` simulated seconds. Raises Violation."""
        for name, slots, standbys in self.plan.nodes:
            hello = Event(name, "", AgentHello(name, slots, standbys, VERSION))
            self.engine.at(self.engine.delay(0.1), partial(self.feed, hello))
        self._tick()
        if self.plan.stop_s:
            self.engine.at(self.plan.stop_s, partial(self.feed, Event("", "", StopRequest(130, "interrupted"))))
        for wish in self.plan.moves:
            self.engine.at(wish.at_s, partial(self._wish, MoveRequest(wish.ranks, to=wish.to)))
        return self.engine.run(until_s=until_s, done=lambda: self.state.phase == "done")

    # ------------------------------------------------------------ controller

    def feed(self, event: Event) -> None:
        """What `service.controller.JobShell` does with an event."""
        decision = decide(self.state, event, now=self.engine.now)
        self.take(event, decision)
        for directed in decision.orders:
            self.send(directed)

    def take(self, event: Event, decision: Decision) -> None:
        """Go on from what was decided."""
        self.state = decision.state
        self.incidents += decision.incidents
        self.findings += decision.findings
        self.moves += decision.moves
        self._check_holders()
        if decision.reason or decision.orders or not isinstance(event.fact, Tick):
            self.journal.append((self.engine.now, event, decision))

    def send(self, directed: Directed) -> None:
        """Give an order to the agent it is for."""
        self._note_fence(directed.member, directed.order)
        agent = self._agents[directed.node]
        self._down[directed.node].send(partial(agent.obey, directed))

    def _wish(self, request: MoveRequest, again: int = 40) -> None:
        """What the control socket does with a person's wish: a mistake is told, and changes nothing. Asked again."""
        try:
            plan_move(self.state, request)
        except UsageError:
            if again and self.state.exit_code is None:
                self.engine.at(0.05, partial(self._wish, request, again - 1))
            return
        self.feed(Event("", "", request))

    def _check_holders(self) -> None:
        """Exactly one process holds a rank, whatever is under way."""
        ranks = [member.rank for member in live(self.state.members)]
        if len(ranks) != len(set(ranks)):
            raise Violation(f"a rank has two holders: {ranks}")

    def _note_fence(self, member: str, order: Order) -> None:
        if isinstance(order, Fence) and self.state.members[member].status is Status.FENCED:
            change = self.state.change
            generation = self.state.generation + 1 if change is None else change.generation
            self.truth.fenced_at.setdefault(member, generation)

    def _tick(self) -> None:
        self.feed(Event("", "", Tick()))
        self.engine.at(_TICK_S, self._tick)

    # ------------------------------------------------------------ nodes

    def _agent(self, node: str) -> SimulatedAgent:
        upward = Channel(self.engine, _WIRE_S)

        def say(member: str, fact: Fact) -> None:
            upward.send(lambda: self.feed(Event(node, member, fact)))

        broken = f"m{self.plan.start_fails}"
        return SimulatedAgent(self.engine, node, spawn=self._spawn, upward=say, broken=broken)

    def _spawn(self, life: Life, order: StartMember) -> None:
        trainee = Trainee(self._around, life, rank=order.rank)
        self.trainees[life.name] = trainee
        report = life.on_exit

        def gone(life: Life) -> None:
            self._around.plane.die(life.name)
            report(life)

        life.on_exit = gone
        life.at_point = lambda life, point: self.injector.pass_point(life, self._around.plane, disk=self._around.disk)
        self.engine.at(0.0, lambda: life.start(trainee.run()))
