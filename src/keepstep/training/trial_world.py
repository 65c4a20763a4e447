"""torch.distributed inside a trial: a world of any size with one member, whatever backend the script asks for."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from keepstep.errors import UsageError
from keepstep.records.trial import GroupAsked, Joined, MeshAsked
from keepstep.training.process_group import BACKEND
from keepstep.training.trial_answers import Answers
from keepstep.training.trial_group import TrialGroup
from keepstep.training.trial_notes import TrialNotes

__all__ = ["TrialWorld", "rank_variables"]


class TrialWorld:
    """Rank `rank` of `world`. `enter()` changes torch.distributed of this process for good."""

    def __init__(self, rank: int, world: int, *, notes: TrialNotes, answers: Answers) -> None:
        self.rank, self.world = rank, world
        self.how = ""
        self._notes, self._answers = notes, answers
        self._asked = 0

    def enter(self) -> None:
        """From now on nothing of torch.distributed leaves this process."""
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=["cpu"])
        changed: list[tuple[Any, Any]] = [
            (distributed_c10d.init_process_group, self._init(distributed_c10d.init_process_group)),
            (distributed_c10d.new_group, self._new(distributed_c10d.new_group)),
            (device_mesh.init_device_mesh, self._mesh(device_mesh.init_device_mesh)),
            (dist.TCPStore, _lone_store),
            (dist.FileStore, _lone_store),
        ]
        _replace(changed)

    @property
    def joined(self) -> bool:
        """Whether the script took its place; `how` says by which call."""
        return bool(self.how)

    def note_join(self, how: str, *, world: int, rank: int) -> None:
        """Write down, once, that the script took its place."""
        if not self.how:
            self.how = how
            self._notes.keep(Joined(how, world, rank, self._notes.site()))

    def _create(self, asked: Any, options: object) -> TrialGroup:
        ranks = tuple(asked.global_ranks_in_group) or tuple(range(asked.group_size))
        number = self._asked - 1
        return TrialGroup(self._notes, self._answers, rank=self.rank, ranks=ranks, name=asked.group_id, number=number)

    def _ask(self, ranks: Sequence[int] | None, *, alone: bool, purpose: str) -> None:
        given = tuple(ranks) if ranks is not None else ()
        if given == tuple(range(self.world)):
            given = ()
        member = not given or self.rank in given
        self._notes.keep(GroupAsked(given, member, alone, purpose, self._notes.site()))
        self._asked += 1

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **others: Any) -> None:
            asked = signature.bind(*args, **others).arguments
            world_size, rank = asked.get("world_size", -1), asked.get("rank", -1)
            self.note_join("init_process_group", world=world_size, rank=rank)
            world, own = (world_size, rank) if world_size > 0 else (self.world, self.rank)
            if own < 0:
                own = self.rank
            self._ask(None, alone=False, purpose="default group")
            if not 0 <= own < world:
                raise UsageError(
                    f"rank {own} in a world of {world}", remedy="leave world_size and rank to the launcher"
                )
            original(BACKEND, store=dist.HashStore(), world_size=world, rank=own)

        return init_process_group

    def _new(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def new_group(*args: Any, **others: Any) -> Any:
            asked = signature.bind(*args, **others).arguments
            ranks = asked.get("ranks")
            ordered = sorted(ranks) if ranks is not None and asked.get("sort_ranks", True) else ranks
            alone = bool(asked.get("use_local_synchronization"))
            self._ask(ordered, alone=alone, purpose=asked.get("group_desc") or "")
            asked.update(timeout=None, backend=BACKEND, pg_options=None, device_id=None)
            return original(**asked)

        return new_group

    def _mesh(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *args: Any, **others: Any) -> Any:
            names = others.get("mesh_dim_names") or ()
            shape = tuple(int(size) for size in mesh_shape)
            self._notes.keep(MeshAsked(shape, tuple(map(str, names)), self._notes.site()))
            if not dist.is_initialized():
                dist.init_process_group()
            return original("cpu", mesh_shape, *args, **others)

        return init_device_mesh


def _lone_store(*args: object, **others: object) -> Any:
    """A store of this process alone, in place of one that would wait for others."""
    return dist.HashStore()


def _replace(changed: list[tuple[Any, Any]]) -> None:
    """Put each second thing in the place of the first under every name that a loaded module of torch knows it by."""
    others = {id(original): other for original, other in changed}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in others:
                    setattr(module, attribute, others[id(value)])


def rank_variables(rank: int, world: int, *, local: int) -> dict[str, str]:
    """torchrun's variables for `rank` of `world`, with `local` ranks on a node."""
    here = min(local, world)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % here),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(rank // here),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
    }
