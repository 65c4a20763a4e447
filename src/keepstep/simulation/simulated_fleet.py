"""A fleet with known truth: eleven months of jobs on lanes of nodes, with planted failures and preemptions.

Jobs of one size run one after another on lanes of as many nodes, so that no node is held twice. Infrastructure
failures are a Poisson process in node-time; a failed life of a run is requeued and goes on from its last checkpoint;
the restart of a large run takes nodes from small jobs that are preempted. Everything is drawn column by column.
"""

from __future__ import annotations

import msgspec
import numpy as np

__all__ = ["DAY_S", "FleetShape", "FleetTruth", "Lives", "simulate_fleet"]

DAY_S = 86_400
_HOUR_S = 3600
_GPUS_A_NODE = 8
_SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
_COUNT_SHARE = np.array([0.55, 0.09, 0.09, 0.205, 0.025, 0.016, 0.010, 0.007, 0.003, 0.002, 0.0015, 0.0005])
_TIME_SHARE = np.array([0.05, 0.02, 0.03, 0.13, 0.05, 0.06, 0.08, 0.09, 0.14, 0.12, 0.13, 0.10])
_MAX_LIVES = 60
_BORROWED_SHARE = 0.19
_MADE_UP = 1.15
"""Makes up for the work that users' failures cut short."""


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """What is planted: attempts and GPU-hours wanted, days, failures per 1000 node-days, checkpoint interval, start-up
    and requeue times (seconds), share of runs that the user's program ends, share of those submitted again.
    """

    attempts: int = 4_000_000
    gpu_hours: float = 150e6
    days: int = 334
    rate_per_1000: float = 6.5
    checkpoint_s: float = 3600
    startup_s: float = 300
    requeue_s: float = 150
    user_failures: float = 0.24
    retried: float = 0.3


class FleetTruth(msgspec.Struct, frozen=True, kw_only=True):
    """What a report on the fleet should find.

    `failures_large` and `node_days_large` are of attempts with more than 128 GPUs. `ettr` is, for each size in GPUs,
    the ratio of sums of work that was kept and of time held or waited for. `second_order_share` follows the rule of at
    most 30 minutes lost an attempt (Meta, HPCA 2025).
    """

    attempts: int
    gpu_hours: float
    rate_per_1000: float
    failures_large: int
    node_days_large: float
    ettr: dict[int, float]
    second_order_share: float
    preempted: int
    retries: int


class Lives(msgspec.Struct, frozen=True):
    """All attempts as columns: `run`, `life`, `size` (GPUs), `lane`, `start`, `end`, `submit` (seconds from the begin),
    `fate` (0 completed, 1 infrastructure, 2 user's failure, 3 preempted, 4 cancelled, 5 time-out, 6 still running),
    `bad` (the node at fault in the lane, -1: none), `borrow` (number of a restart that took nodes, -1: none).

    `restarts` maps such a number to the nodes it took; `victims` maps preempted attempts to their node.
    """

    run: np.ndarray
    life: np.ndarray
    size: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    submit: np.ndarray
    fate: np.ndarray
    bad: np.ndarray
    borrow: np.ndarray
    retry: np.ndarray
    restarts: dict[int, list[int]]
    victim_node: dict[int, int]
    lane_nodes: np.ndarray
    nodes: int


def simulate_fleet(shape: FleetShape, rng: np.random.Generator) -> tuple[Lives, FleetTruth]:
    """The attempts of a fleet, and the truth about them."""
    begin, pieces, lane, node = 0, [], 0, 0
    lane_nodes: list[np.ndarray] = []
    for place, size in enumerate(_SIZES):
        runs = max(int(shape.attempts * _COUNT_SHARE[place] * 0.995), 4)
        hours = shape.gpu_hours * _TIME_SHARE[place] * _MADE_UP
        lives, kept = _runs_of_size(shape, rng, size=int(size), runs=runs, gpu_hours=hours)
        lanes, lives = _on_lanes(shape, rng, lives=lives, size=int(size))
        width = max(size // _GPUS_A_NODE, 1)
        shared = max(_GPUS_A_NODE // size, 1)
        firsts = node + (np.arange(lanes) // shared) * width
        lane_nodes.append(firsts)
        node += -(-lanes // shared) * width
        lives["lane"] += lane
        lives["run"] += begin
        lane, begin = lane + lanes, begin + runs
        pieces.append(lives | {"kept": kept})
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return _with_preemptions(shape, rng, lives=joined, places=(np.concatenate(lane_nodes), node, begin))


def _runs_of_size(
    shape: FleetShape, rng: np.random.Generator, *, size: int, runs: int, gpu_hours: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The lives of `runs` runs: run, life, length, fate, and the work each life kept."""
    mean_s = gpu_hours / runs / size * _HOUR_S
    sigma = 1.0 if size >= 128 else 1.3
    work = np.minimum(rng.lognormal(np.log(mean_s) - sigma**2 / 2, sigma, runs), 21 * DAY_S).round() + 30
    fate = rng.choice([0, 2, 4, 5], runs, p=[0.91 - shape.user_failures, shape.user_failures, 0.08, 0.01])
    work = np.where(fate == 0, work, np.maximum(work * rng.random(runs), 5).round())
    mean_life = DAY_S / (max(size / _GPUS_A_NODE, 1 / _GPUS_A_NODE) * shape.rate_per_1000 / 1000)
    left, alive = work.copy(), np.arange(runs)
    found: list[dict[str, np.ndarray]] = []
    for life in range(_MAX_LIVES):
        wanted = shape.startup_s + left[alive]
        fails_at = rng.exponential(mean_life, len(alive)).round() + 1
        failed = fails_at < wanted
        length = np.where(failed, fails_at, wanted)
        inside = np.clip(fails_at - shape.startup_s, 0, left[alive])
        done = ~failed & (fate[alive] == 0)
        kept = np.where(done, left[alive], np.floor(inside / shape.checkpoint_s) * shape.checkpoint_s)
        found.append(
            {
                "run": alive.copy(),
                "life": np.full(len(alive), life),
                "length": length,
                "fate": np.where(failed, 1, fate[alive]),
                "kept": kept,
            }
        )
        left[alive] -= kept
        alive = alive[failed]
        if not len(alive):
            break
    lives = {name: np.concatenate([piece[name] for piece in found]) for name in found[0]}
    order = np.lexsort((lives["life"], lives["run"]))
    lives = {name: values[order] for name, values in lives.items()}
    return lives, lives.pop("kept")


def _on_lanes(
    shape: FleetShape, rng: np.random.Generator, *, lives: dict[str, np.ndarray], size: int
) -> tuple[int, dict[str, np.ndarray]]:
    """Places the runs on as many lanes as their time needs, one after another; number of lanes, and the columns."""
    count = len(lives["run"])
    first = lives["life"] == 0
    runs = int(first.sum())
    gap = np.where(first, rng.exponential(60, count).round() + 30, shape.requeue_s + rng.exponential(30, count).round())
    total = float((lives["length"] + gap).sum())
    lanes = max(int(np.ceil(total / (shape.days * DAY_S * 0.985))), 1)
    of_run = np.arange(runs) % lanes
    lane = of_run[lives["run"]]
    order = np.lexsort((np.arange(count), lane))
    held = (lives["length"] + gap)[order]
    ends = np.cumsum(held)
    starts_lane = np.flatnonzero(np.r_[True, np.diff(lane[order]) > 0])
    base = np.repeat(ends[starts_lane] - held[starts_lane], np.diff(np.r_[starts_lane, count]))
    end = np.empty(count)
    end[order] = ends - base
    start = end - lives["length"]
    before = np.r_[np.inf, end[order][:-1]]
    before[starts_lane] = 0
    previous_end = np.empty(count)
    previous_end[order] = before
    fate_before = np.empty(count, dtype=int)
    fate_before[order] = np.r_[-1, lives["fate"][order][:-1]]
    retry = first & (fate_before == 2) & (rng.random(count) < shape.retried) & (previous_end > 0)
    wait = np.minimum(rng.exponential(600, count).round(), start)
    submit = np.where(first & ~retry, start - wait, np.minimum(previous_end + (retry * 5), start))
    return lanes, {
        **{name: lives[name] for name in ("run", "life", "fate")},
        "size": np.full(count, size),
        "lane": lane,
        "start": start.round(),
        "end": end.round(),
        "submit": submit.round(),
        "retry": retry,
    }


def _with_preemptions(
    shape: FleetShape, rng: np.random.Generator, *, lives: dict[str, np.ndarray], places: tuple[np.ndarray, int, int]
) -> tuple[Lives, FleetTruth]:
    """Cuts at the end of the log, and adds the small jobs whose nodes restarts of large runs took."""
    lane_nodes, nodes, runs = places
    horizon = shape.days * DAY_S
    inside = lives["start"] < horizon
    lives = {name: values[inside] for name, values in lives.items()}
    open_ = lives["end"] > horizon
    lives["fate"] = np.where(open_, 6, lives["fate"])
    lives["end"] = np.minimum(lives["end"], horizon)
    count = len(lives["run"])
    width = np.maximum(lives["size"] // _GPUS_A_NODE, 1)
    lives["bad"] = np.where(lives["fate"] == 1, (rng.random(count) * width).astype(int), -1)
    takes = np.flatnonzero((lives["life"] > 0) & (lives["size"] >= 64))
    lives["borrow"] = np.full(count, -1)
    lives["borrow"][takes] = np.arange(len(takes))
    wanted = np.maximum((width[takes] * _BORROWED_SHARE).round().astype(int), 1)
    cut = np.repeat(lives["start"][takes], wanted)
    ran = np.minimum(2 * _HOUR_S + rng.exponential(4 * _HOUR_S, len(cut)).round(), cut - 1)
    until = np.repeat(lives["end"][takes], wanted)
    keep = ran > 60
    owner = np.repeat(np.arange(len(takes)), wanted)
    spare = _spare_nodes(cut - ran, until)
    restarts: dict[int, list[int]] = {}
    for number, node, real in zip(owner.tolist(), (spare + nodes).tolist(), keep.tolist(), strict=True):
        if real:
            restarts.setdefault(number, []).append(node)
    victims = {
        "run": runs + np.arange(int(keep.sum())),
        "life": np.zeros(int(keep.sum()), dtype=int),
        "fate": np.full(int(keep.sum()), 3),
        "size": np.full(int(keep.sum()), _GPUS_A_NODE),
        "lane": np.full(int(keep.sum()), -1),
        "start": (cut - ran)[keep],
        "end": cut[keep],
        "submit": np.maximum((cut - ran)[keep] - 120, 0),
        "retry": np.zeros(int(keep.sum()), dtype=bool),
        "kept": np.maximum(ran[keep] - shape.checkpoint_s / 2, 0),
        "bad": np.full(int(keep.sum()), -1),
        "borrow": np.full(int(keep.sum()), -1),
    }
    joined = {name: np.concatenate([lives[name], victims[name]]) for name in victims}
    victim_node = dict(zip(range(count, count + int(keep.sum())), (spare[keep] + nodes).tolist(), strict=True))
    kept = joined.pop("kept")
    every = Lives(
        **joined,
        restarts=restarts,
        victim_node=victim_node,
        lane_nodes=lane_nodes,
        nodes=nodes + int(spare.max(initial=-1)) + 1,
    )
    return every, _truth(shape, every, kept=kept)


def _spare_nodes(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """A number for each time, so that times with the same number do not overlap."""
    import heapq

    free: list[tuple[float, int]] = []
    numbers = np.empty(len(begin), dtype=int)
    made = 0
    for index in np.argsort(begin, kind="stable").tolist():
        if free and free[0][0] <= begin[index]:
            number = heapq.heappop(free)[1]
        else:
            number, made = made, made + 1
        numbers[index] = number
        heapq.heappush(free, (float(end[index]) + 60, number))
    return numbers


def _truth(shape: FleetShape, lives: Lives, *, kept: np.ndarray) -> FleetTruth:
    """The figures, from what was planted."""
    held = lives.end - lives.start
    nodes = np.maximum(lives.size / _GPUS_A_NODE, 1)
    large = lives.size > 128
    failed = lives.fate == 1
    lost = np.minimum(held, 1800) * lives.size
    first, second = float(lost[failed].sum()), float(lost[lives.fate == 3].sum())
    waited = np.where(lives.life == 0, lives.start - lives.submit, 0)
    between = np.r_[0, np.where(np.diff(lives.run) == 0, lives.start[1:] - lives.end[:-1], 0)]
    wall = held + waited + np.maximum(between, 0)
    ettr = {int(size): _share(kept, wall, among=lives.size == size) for size in np.unique(lives.size)}
    return FleetTruth(
        attempts=len(lives.run),
        gpu_hours=float((held * lives.size).sum() / _HOUR_S),
        rate_per_1000=shape.rate_per_1000,
        failures_large=int((failed & large).sum()),
        node_days_large=float((held * nodes)[large].sum() / DAY_S),
        ettr=ettr,
        second_order_share=second / max(first + second, 1.0),
        preempted=int((lives.fate == 3).sum()),
        retries=int(lives.retry.sum()),
    )


def _share(part: np.ndarray, whole: np.ndarray, *, among: np.ndarray) -> float:
    return float(part[among].sum() / whole[among].sum())
