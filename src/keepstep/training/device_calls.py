"""How a process group carries out calls on tensors that are not on the CPU: by a communicator, or through the host.

NOT RUN ON GPUs. A group decides once in each generation, all members alike; see `communicator.py`. Messages from one to
one, and reductions that the library does not have, always go through the host.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import torch

from keepstep.errors import EnvironmentProblem
from keepstep.training.comm_library import CommLibrary
from keepstep.training.comm_steps import carries
from keepstep.training.communicator import Communicator
from keepstep.training.copier import Copier, copier_of
from keepstep.training.direct_work import Blame, DirectPrepared, DirectWork
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.links import Channel
from keepstep.training.nccl import NcclLibrary
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status
from keepstep.training.staging import StagedPrepared, Stager
from keepstep.training.tensor_calls import Prepared, check_dense
from keepstep.training.watch import News

__all__ = ["DeviceCalls"]


def _copier(tensor: torch.Tensor) -> Copier | None:
    """What copies a tensor that is not on the CPU."""
    if tensor.is_cpu:
        return None
    check_dense(tensor)
    return copier_of(tensor.device)


@cache
def _library() -> CommLibrary | None:
    try:
        return NcclLibrary()
    except EnvironmentProblem:
        return None


def _identity(device: torch.device) -> bytes:
    """16 bytes that are equal exactly for the same device."""
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[:16]


class DeviceCalls:
    """For one process group. `copier_of` and `communicator` may be set to others before the first call."""

    def __init__(
        self, fabric: Fabric, ranks: tuple[int, ...], *, channel: Callable[[Lane], Channel], stager: Stager
    ) -> None:
        self._fabric, self._ranks = fabric, ranks
        self._own = ranks.index(fabric.rank)
        self._channel, self._stager = channel, stager
        self.copier_of: Callable[[torch.Tensor], Copier | None] = _copier
        self.communicator: Communicator | None = None
        self._linked = False

    def prepared(
        self, result: object, tensors: Sequence[torch.Tensor], *, kind: tuple[Element, Reduction] | None = None
    ) -> Prepared:
        """For a collective on `tensors`, which reduces as `kind`, if at all."""
        copier = self.copier_of(tensors[0]) if tensors else None
        if copier is None:
            return Prepared(result)
        if (kind is None or carries(*kind)) and self._of(tensors[0]).ready():
            return DirectPrepared(result, copier)
        return StagedPrepared(result, copier)

    def messages(self, result: object, tensors: Sequence[torch.Tensor]) -> Prepared:
        """For a message from one to one."""
        copier = self.copier_of(tensors[0])
        return Prepared(result) if copier is None else StagedPrepared(result, copier)

    def run(self, calls: Sequence[Call], prepared: DirectPrepared, *, blame: Blame) -> DirectWork:
        """Enqueues a collective whose `prepared` is from here."""
        assert self.communicator is not None
        return self.communicator.run(calls, prepared, blame=blame)

    def close(self) -> None:
        """The group is over."""
        if self.communicator is not None:
            self.communicator.close()
        if self._linked:
            self._fabric.gates.remove(self)

    def _of(self, tensor: torch.Tensor) -> Communicator:
        if self.communicator is None:
            self.communicator = Communicator(self, _library(), own=self._own, device=_identity(tensor.device))
        if not self._linked:
            self._fabric.gates.append(self)
            self._linked = True
        return self.communicator

    # ------------------------------------------------------------------ what the fabric asks (fabric.Gate)

    def stop(self) -> None:
        """A loss was heard of."""
        if self.communicator is not None:
            self.communicator.stop()

    def settled(self) -> bool:
        """Before an agreement: whether all calls on devices are done. A communicator that failed while all live counts
        as a broken link."""
        if self.communicator is None or self.communicator.settled():
            return True
        if self.live:
            peer = self._ranks[self._own - 1]
            self._fabric.heard(News.LOST, peer, generation=self._fabric.generation)
        return False

    # ------------------------------------------------------------------ what the communicator asks (Group)

    @property
    def generation(self) -> int:
        """The installed generation."""
        return self._fabric.generation

    @property
    def live(self) -> bool:
        """Whether collectives run."""
        return self._fabric.mode is Mode.LIVE

    @property
    def exposed(self) -> bool:
        """Whether a protected member is between two steps."""
        return self._fabric.protected and self._fabric.exposed

    def exchange(self, data: bytes) -> list[bytes] | None:
        """Everybody's `data` in the order of the roles, over the data plane; None if it was cut."""
        self._stager.flush()
        size, count = len(data), len(self._ranks)
        own, every = array.array("B", data), array.array("B", bytes(size * count))
        source, target = own.buffer_info()[0], every.buffer_info()[0]
        call = Call(Op.ALL_GATHER, inputs=[(source, size)], outputs=[(target + size * n, size) for n in range(count)])
        channel = self._channel(Lane.COLLECTIVE)
        ticket = channel.submit(call)
        status = channel.plane.wait(ticket)
        channel.plane.release(ticket)
        if status is not Status.DONE:
            return None
        return [every[size * number : size * (number + 1)].tobytes() for number in range(count)]
