"""Findings about ranks that hold up a job which still moves: slow computing, slow loaders, or too little CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keepstep.diagnosis.baseline import difference
from keepstep.diagnosis.job_environment import fingerprint_of
from keepstep.diagnosis.live_state import Verdict, Watch
from keepstep.diagnosis.roles import explained_by_place, families_of
from keepstep.diagnosis.slowness import STEPS, Excess, cpu_noise, past_of, present_scatter, slow_ranks
from keepstep.diagnosis.windows import COLUMNS, Numbers
from keepstep.records.finding import Finding, Layer, Suspect

__all__ = ["data_verdicts", "slow_verdicts"]

_EXPLAINS = 0.5
_ACCELERATORS = ("nvidia", "gpu", "cuda", "amd instinct", "rocm", "tpu", "gaudi", "ascend")
_DATA_SHARE = 0.05
_STALL_SHARE = 0.3
_LASTING = 14
_UNBROKEN = 20
_PART = 0.33
_SCATTER = 6.0


def slow_verdicts(watch: Watch, step: int, *, roles: Numbers) -> Iterator[Verdict]:
    """One verdict for each rank (or node) whose own time is too long at `step`, or one that it is the layout's way."""
    slow = slow_ranks(watch, step)
    if slow:
        noise = cpu_noise(watch, step)
        slow = [one for one in slow if _stands_out(one, float(noise[one.rank]), known=one.rank in watch.anchors)]
    if not slow:
        return
    unknown = [one for one in slow if not one.known]
    if len(unknown) > 1 and explained_by_place(
        (one.rank for one in unknown), families_of(watch.profiles, watch.plan.world)
    ):
        yield _by_layout(watch, unknown, step=step)
        slow = [one for one in slow if one.known]
    waiting = _waits_for_cpu(watch, step)
    computing = _uses_cpu(watch, step)
    for one in slow:
        yield _of_rank(
            watch, one, step=step, starved=float(waiting[one.rank]), busy=float(computing[one.rank]), roles=roles
        )


def _stands_out(one: Excess, noise_us: float, *, known: bool) -> bool:
    """Whether a rank is late by more than its turns for a CPU may make it, or less but without a break, or `known`."""
    lasting = known or one.steps >= _UNBROKEN
    return one.excess_us > (_PART * noise_us if lasting else noise_us)


def _of_rank(watch: Watch, one: Excess, *, step: int, starved: float, busy: float, roles: Numbers) -> Verdict:
    peers = int(np.count_nonzero(roles == roles[one.rank])) - 1
    factor = float(np.exp(one.ratio))
    usual_words = "its own usual time and that of" if one.known else "the time of"
    evidence = [
        f"rank {one.rank}: {factor:.2f} x {usual_words} {peers} peers with the same work, "
        f"for {one.steps} steps up to step {step}",
        f"{one.excess_us / 1e3:.1f} ms longer outside collectives than its peers; they wait for it",
    ]
    where = Suspect(rank=one.rank)
    common = {"key": f"slow:{one.rank}", "since": step - one.steps + 1}
    cost = max(one.excess_us, 0.0) * 1e-6 * watch.plan.world
    victims = tuple(rank for rank in range(watch.plan.world) if rank != one.rank) if watch.plan.world <= 1024 else ()
    if starved > _EXPLAINS * one.excess_us:
        evidence.append(
            f"rank {one.rank} was ready to run and had no CPU for {starved / 1e3:.1f} ms of each step more than usual"
        )
        node = _node(watch, one.rank)
        finding = Finding(
            kind="imbalance",
            layer="host_cpu",
            victims=victims,
            confidence=_confidence(one),
            evidence=tuple(evidence),
            next_probe=f"what else runs on the CPUs of {node or 'its node'}? CPU binding of its processes",
            cost=cost,
        )
        return Verdict(finding=finding, **common)  # type: ignore[arg-type]
    layer: Layer = "hardware_gpu" if _has_accelerator(watch, one.rank) else "host_cpu"
    if busy > _EXPLAINS * one.excess_us:
        layer = "application"
        evidence.append(
            f"its process used {busy / 1e3:.1f} ms of CPU in each step more than usual: it computes something else"
        )
    if not one.known:
        evidence.append("it was so from the first steps seen: no usual time of its own to compare with")
        evidence += _about_baseline(watch)
    finding = Finding(
        kind="compute_slow",
        layer=layer,
        suspects=((where,),),
        victims=victims,
        confidence=_confidence(one) - (0.0 if peers > 1 else 0.15),
        evidence=tuple(evidence),
        next_probe=f"speed test of the device and CPUs of rank {one.rank}, and its Python stacks",
        cost=cost,
    )
    return Verdict(finding=finding, **common)  # type: ignore[arg-type]


def _about_baseline(watch: Watch) -> list[str]:
    """What an earlier run's baseline is worth here, in words."""
    if watch.plan.baseline is None:
        return []
    differs = difference(watch.plan.baseline, fingerprint_of(watch))
    if differs:
        return [f"the baseline of an earlier run is of another environment ({differs}) and was not used"]
    return []


def _confidence(one: Excess) -> float:
    sure = 0.98 if one.known else 0.8
    return round(float(sure - 0.33 * np.exp(-max(one.margin - 1.0, 0.0))), 2)


def _node(watch: Watch, rank: int) -> str:
    seen = watch.seen.get(rank)
    return seen.node if seen else ""


def _has_accelerator(watch: Watch, rank: int) -> bool:
    profile = watch.profiles.get(rank)
    words = profile.hardware.lower() if profile else ""
    return any(word in words for word in _ACCELERATORS)


def _extra(watch: Watch, metric: str, *, step: int) -> Numbers:
    """For each rank, how much more of a metric (us a step) the last steps took than its past ones."""
    history = watch.history
    recent = np.median(history.of(metric, step, count=STEPS), axis=1)
    middle, _, count = past_of(watch, metric, step=step)
    if not count:
        return recent - float(np.median(recent))
    return recent - middle


def _waits_for_cpu(watch: Watch, step: int) -> Numbers:
    extra = _extra(watch, "delay_us", step=step)
    return extra - max(float(np.median(extra)), 0.0)


def _uses_cpu(watch: Watch, step: int) -> Numbers:
    extra = _extra(watch, "cpu_us", step=step)
    return extra - max(float(np.median(extra)), 0.0)


def _by_layout(watch: Watch, slow: list[Excess], *, step: int) -> Verdict:
    ranks = sorted(one.rank for one in slow)
    longest = max(slow, key=lambda one: one.excess_us)
    finding = Finding(
        kind="imbalance",
        layer="application",
        confidence=0.8,
        evidence=(
            f"ranks {ranks[:8]}{' ...' if len(ranks) > 8 else ''} take up to {np.exp(longest.ratio):.2f} x "
            "as long as the others",
            "they are exactly the ranks with one place in their groups: the layout gives them more work",
        ),
        next_probe="a layout that gives this place less work",
        cost=longest.excess_us * 1e-6 * watch.plan.world,
    )
    return Verdict(key="imbalance", finding=finding, since=step)


def data_verdicts(watch: Watch, step: int) -> Iterator[Verdict]:
    """Verdicts about waits for the loader: of single ranks, or of all at once."""
    history = watch.history
    columns = history.columns(step, STEPS)
    judged = history.judged[columns] == np.arange(max(0, step - STEPS + 1), step + 1)
    if len(columns) < STEPS or not judged.all():
        return
    lasted = float(np.median(history.of("duration_us", step, count=STEPS)))
    stalled = _all_stalled(watch, step, lasted=lasted)
    if stalled is not None:
        yield stalled
        return
    recent = history.extra_data[:, columns]
    middle, scatter, count = past_of(watch, "extra_data", step=step)
    for rank, anchor in watch.data_anchors.items():
        middle[rank] = anchor
    known = count >= STEPS
    shift = recent - middle[:, None] if known else recent
    least = _DATA_SHARE * lasted * (1 if known else 2)
    scatter = np.maximum(scatter, present_scatter(shift))
    limit = np.maximum(least, _SCATTER * scatter / np.sqrt(STEPS))
    extra = np.median(shift, axis=1)
    often = np.count_nonzero(shift > 0.5 * limit[:, None], axis=1) >= STEPS - 1
    often &= (extra > 2 * least) | _long_late(watch, step, middle=middle, limit=limit)
    late = np.flatnonzero((extra > limit) & often).tolist()
    if late:
        extra -= np.maximum(_waits_for_cpu(watch, step), 0.0)
        noise = cpu_noise(watch, step)
        late = [rank for rank in late if extra[rank] > max(float(limit[rank]), _PART * float(noise[rank]))]
    if not known and explained_by_place(late, families_of(watch.profiles, watch.plan.world)):
        return
    for rank in late:
        yield _late_loader(watch, rank, step=step, extra_us=float(extra[rank]), margin=float(extra[rank] / limit[rank]))


def _long_late(watch: Watch, step: int, *, middle: Numbers, limit: Numbers) -> Numbers:
    """Which ranks have waited longer for data in most of the last steps: a small wait has to last."""
    history = watch.history
    steps = np.arange(max(0, step - _LASTING + 1), step + 1)
    steps = steps[history.judged[steps % COLUMNS] == steps]
    above = history.extra_data[:, steps % COLUMNS] - middle[:, None] > 0.5 * limit[:, None]
    lasting: Numbers = np.count_nonzero(above, axis=1) >= _LASTING - 2
    return lasting


def _late_loader(watch: Watch, rank: int, *, step: int, extra_us: float, margin: float) -> Verdict:
    finding = Finding(
        kind="compute_slow",
        layer="dataloader",
        suspects=((Suspect(rank=rank),),),
        victims=tuple(other for other in range(watch.plan.world) if other != rank) if watch.plan.world <= 1024 else (),
        confidence=round(float(0.97 - 0.3 * np.exp(-(margin - 1.0))), 2),
        evidence=(
            f"rank {rank} waits {extra_us / 1e3:.1f} ms longer for each batch than the others, "
            f"for {STEPS} steps up to step {step}",
            "the others get theirs in the usual time and wait for this rank in the collectives",
        ),
        next_probe=f"time of the loader of rank {rank} alone, its workers' stacks, and the storage its node reads from",
        cost=extra_us * 1e-6 * watch.plan.world,
    )
    return Verdict(key=f"data:{rank}", finding=finding, since=step - STEPS + 1)


def _all_stalled(watch: Watch, step: int, *, lasted: float) -> Verdict | None:
    """Whether nearly every rank waits for data more than usual: the source is slow, no rank is."""
    history = watch.history
    middle, _, count = past_of(watch, "data_us", step=step)
    if count < STEPS:
        return None
    usual_step = max(float(np.median(past_of(watch, "duration_us", step=step)[0])), 1.0)
    extra = np.median(history.of("data_us", step, count=3), axis=1) - middle
    share = float(np.mean(extra > _STALL_SHARE * usual_step))
    if share < 0.75:
        return None
    cost = float(np.median(extra)) * 1e-6
    finding = Finding(
        kind="imbalance",
        layer="storage",
        confidence=0.85,
        evidence=(
            f"{share:.0%} of the ranks wait for data at once: {cost * 1e3:.0f} ms a step more than usual (step {step})",
            "no rank differs from the others: the source of the data is slow, not a member",
        ),
        next_probe="read rate of the storage that all loaders share",
        cost=cost * watch.plan.world,
    )
    return Verdict(key="data:all", finding=finding, since=step - 2)
