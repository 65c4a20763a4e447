"""The torch.distributed backend `keepstep`: a Python subclass of ProcessGroup over the data plane.

What torch 2.13 needs of such a subclass is described in the comments; method names of older versions are kept as
aliases. With a fabric that an agent protects, no method and no `wait` raises for a lost member.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import DistBackendError, ReduceOp

from keepstep.errors import GroupAborted
from keepstep.training.device_calls import DeviceCalls
from keepstep.training.direct_work import DirectPrepared
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.group_identity import GroupIdentity
from keepstep.training.hearing import HEARING
from keepstep.training.links import Channel
from keepstep.training.local_answers import answer_locally
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status
from keepstep.training.staging import StagedPrepared, StagedWork, Stager
from keepstep.training.tensor_calls import Prepared, element_of, parts, reduction_of, rows
from keepstep.training.work import Completer, DoneWork, PlaneWork

__all__ = ["KeepstepGroup"]

_Tensors = Sequence[torch.Tensor]


_DISAGREEMENTS = (errno.EPROTO, errno.EMSGSIZE, errno.EINVAL, errno.ETIMEDOUT)
_NEWS_S = 0.5


def _as_list(tensors: _Tensors | torch.Tensor) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _operation(opts: object) -> ReduceOp:
    """The reduction in an options object; overloads without options pass the reduction itself, or nothing."""
    if opts is None:
        return ReduceOp(ReduceOp.SUM)
    found = getattr(opts, "reduceOp", opts)
    return found if isinstance(found, ReduceOp) else ReduceOp(found)


def _cut_error(where: str, lost: Collection[int]) -> GroupAborted:
    """A collective between two steps has no result, and nobody can do it again."""
    who = f" by the loss of rank {', '.join(map(str, sorted(lost)))}" if lost else ""
    return GroupAborted(
        f"{where} was cut{who} between two steps: it has no result",
        remedy="put it inside `with step:` before optimizer.step(), where an interrupted step is done again",
    )


def _lost_error(where: str, lost: Collection[int]) -> DistBackendError:
    named = ", ".join(f"rank {rank}" for rank in sorted(lost))
    what = f"{named} is gone" if lost else "the group was shut down or aborted"
    return DistBackendError(
        f"{where}: {what} -> end this process, look at the log of that rank; 'keepstep run' replaces lost ranks"
    )


class KeepstepGroup(GroupIdentity, ProcessGroup):  # type: ignore[misc]
    """One process group. `ranks` are the global ranks of its members in group order.

    `on_shutdown` is called once when the group is shut down or aborted.
    """

    def __init__(
        self, fabric: Fabric, name: str, *, ranks: tuple[int, ...], timeout: timedelta, on_shutdown: Callable[[], None]
    ) -> None:
        self._own = ranks.index(fabric.rank)
        super().__init__(self._own, len(ranks))  # the only constructor that works for a Python subclass
        self._fabric, self._name, self._description = fabric, name, "undefined"
        self._ranks = ranks
        self._count = len(ranks)
        self._timeout_s = timeout.total_seconds()
        self._on_shutdown = on_shutdown
        self._over = False
        self._sequence = itertools.count(1)
        self._last = 0
        self._named = False
        self._channels: dict[Lane, Channel] = {}
        self._completer = Completer(name)
        self._stager = Stager(name)
        self.devices = DeviceCalls(fabric, ranks, channel=self._channel, stager=self._stager)
        self._drifting: list[PlaneWork] = []

    @property
    def fabric(self) -> Fabric:
        """The fabric this group's collectives run over."""
        return self._fabric

    # ------------------------------------------------------------------ submitting

    def _channel(self, lane: Lane) -> Channel:
        found = self._channels.get(lane)
        if found is None:
            self._named = True
            found = self._channels[lane] = self._fabric.channel(self._name, lane, ranks=self._ranks)
        return found

    def _limit(self, opts: object) -> float:
        asked = getattr(opts, "timeout", None)
        seconds = asked.total_seconds() if asked is not None else -1.0
        return seconds if seconds > 0 else self._timeout_s

    def _submit(self, calls: Sequence[Call], prepared: Prepared, opts: object = None) -> Work:
        """Hands `calls` of one collective to its lane; alone, or in LOCAL mode, it is answered here and now."""
        if self._over:
            raise DistBackendError(f"group {self._name!r} was shut down -> make a new group")
        if self._fabric.mode is Mode.LOCAL:
            prepared.start()
            replay = HEARING.replay
            for call in calls:
                prepared.await_inputs(call)
                if replay is None:
                    answer_locally(call, self._own)
                else:
                    replay.answer(call, group=self._name, rank=self._own)
            prepared.finish()
            prepared.join()
            return DoneWork(prepared.result)
        tape = HEARING.tape
        if tape is not None:
            tape.note(calls, prepared, group=(self._name, self._own, self._count))
        drills = self._fabric.drills
        pace = drills.pace if drills is not None else None
        if drills is not None and pace is not None:
            pace.pause()
            calls = drills.altered(calls, rank=self._own)
        lane = Lane.P2P if calls[0].op >= Op.SEND else Lane.COLLECTIVE
        channel = self._channel(lane)
        limit_s = self._limit(opts)
        if isinstance(prepared, DirectPrepared):
            self._last = number = next(self._sequence)
            cut = partial(self._blame, calls[0].op, number, channel, Status.ABORTED, -1)
            return self.devices.run(calls, prepared, blame=cut)
        staged = isinstance(prepared, StagedPrepared)
        alone = len(calls) == 1 and lane is Lane.COLLECTIVE and not staged
        inline = alone and getattr(opts, "asyncOp", True) is False
        self._last = number = next(self._sequence)
        for call in calls:
            call.timeout_s = limit_s
            call.inline = inline
        completer = self._completer if lane is Lane.COLLECTIVE else None
        blame = partial(self._blame, calls[0].op, number, channel)
        work: PlaneWork
        if isinstance(prepared, StagedPrepared):
            work = late = StagedWork(channel.plane, prepared, blame=blame, completer=completer)
            self._stager.submit(late, prepared, calls=prepared.cut(calls), send=channel.submit)
        else:
            self._stager.flush()
            tickets = [channel.submit(call) for call in calls]
            work = PlaneWork(channel.plane, tickets, prepared=prepared, blame=blame, completer=completer)
        work.pace = pace
        if not inline:
            self._keep(work)
        return work

    def _keep(self, work: PlaneWork) -> None:
        """Keeps works that nobody may wait for until they are done, so that their tensors live long enough."""
        self._drifting.append(work)
        if len(self._drifting) > 8:
            self._drifting = [other for other in self._drifting if not other.is_completed()]

    def _blame(self, op: Op, number: int, channel: Channel, status: Status, ticket: int) -> Exception | None:
        """The error of a call that was not done, or None where it must not raise."""
        fabric = self._fabric
        where = f"{op.name.lower()} number {number} of group {self._name!r} on rank {fabric.rank}"
        if fabric.protected and (status is Status.ABORTED or fabric.mode is not Mode.LIVE):
            return _cut_error(where, fabric.lost) if fabric.exposed else None
        if status is Status.PENDING:
            return DistBackendError(f"{where}: not done in the time given to wait() -> see which rank did not call it")
        if status is Status.ABORTED:
            return _lost_error(where, fabric.lost)
        failure = channel.plane.failure(ticket)
        if failure.peer >= 0 and failure.errno not in _DISAGREEMENTS:
            lost = fabric.await_loss(_NEWS_S)
            if lost or failure.errno != errno.ECONNABORTED:  # that one: a peer gave up and said why
                return _lost_error(where, lost or {channel.plane.global_ranks[failure.peer]})
        peer = f"rank {channel.plane.global_ranks[failure.peer]}" if failure.peer >= 0 else "no single rank"
        return DistBackendError(
            f"{where}: {failure.what} (peer: {peer}) -> check that all ranks make the same calls with the same sizes,"
            " and look at the log of that rank"
        )

    # ------------------------------------------------------------------ reductions

    def allreduce(
        self, tensors: _Tensors | torch.Tensor, opts: object = None, timeout: timedelta | None = None
    ) -> Work:
        """Every rank gets the reduction of the tensors, in place."""
        tensors = _as_list(tensors)
        element, reduction = kind = self._kind(tensors, opts)
        prepared = self.devices.prepared(tensors, tensors, kind=kind)
        spans = [prepared.update(tensor) for tensor in tensors]
        call = Call(op=Op.ALL_REDUCE, element=element, reduction=reduction, inputs=spans, outputs=spans)
        return self._submit([call], prepared, opts)

    def allreduce_coalesced(self, tensors: _Tensors, opts: object = None) -> Work:
        """As `allreduce`, all tensors (of one type) in one go."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: object = None) -> Work:
        """The root gets the reduction; the tensors of others stay as they are."""
        element, reduction = kind = self._kind(tensors, opts)
        prepared = self.devices.prepared(list(tensors), tensors, kind=kind)
        root = getattr(opts, "rootRank", 0)
        at_root = root == self._own
        inputs = [prepared.update(tensor) if at_root else prepared.read(tensor) for tensor in tensors]
        outputs = inputs if at_root else []
        call = Call(op=Op.REDUCE, element=element, reduction=reduction, root=root, inputs=inputs, outputs=outputs)
        return self._submit([call], prepared, opts)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: object = None) -> Work:
        """Every rank gets its part of the reduction of lists of tensors."""
        element, reduction = kind = self._kind(outputs, opts)
        prepared = self.devices.prepared(list(outputs), outputs, kind=kind)
        calls = []
        for output, tensors in zip(outputs, inputs, strict=True):
            spans = [prepared.read(tensor) for tensor in tensors]
            calls.append(self._scattered(spans, prepared.write(output), element, reduction))
        return self._submit(calls, prepared, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: object = None) -> Work:
        """Every rank gets its part of the reduction of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, tensors: _Tensors, opts: object = None) -> Work:
        """As `reduce_scatter_single` for several tensors."""
        element, reduction = kind = self._kind(outputs, opts)
        prepared = self.devices.prepared(list(outputs), outputs, kind=kind)
        calls = []
        for output, tensor in zip(outputs, tensors, strict=True):
            spans = parts(prepared.read(tensor), self._count)
            calls.append(self._scattered(spans, prepared.write(output), element, reduction))
        return self._submit(calls, prepared, opts)

    def _scattered(
        self, spans: list[tuple[int, int]], output: tuple[int, int], element: Element, reduction: Reduction
    ) -> Call:
        return Call(op=Op.REDUCE_SCATTER, element=element, reduction=reduction, inputs=spans, outputs=[output])

    def _kind(self, tensors: _Tensors, opts: object) -> tuple[Element, Reduction]:
        return element_of(tensors[0], reduced=True), reduction_of(_operation(opts))

    # ------------------------------------------------------------------ moving data

    def broadcast(self, tensors: _Tensors | torch.Tensor, opts: object = None) -> Work:
        """All ranks get the tensors of the root."""
        tensors = _as_list(tensors)
        prepared = self.devices.prepared(tensors, tensors)
        root = getattr(opts, "rootRank", 0)
        call = Call(op=Op.BROADCAST, element=element_of(tensors[0], reduced=False), root=root)
        if root == self._own:
            call.inputs = [prepared.read(tensor) for tensor in tensors]
        else:
            call.outputs = [
                prepared.write(tensor) if self._fabric.mode is not Mode.LOCAL else prepared.update(tensor)
                for tensor in tensors
            ]
        return self._submit([call], prepared, opts)

    def allgather(self, outputs: Sequence[_Tensors], tensors: _Tensors, opts: object = None) -> Work:
        """All ranks get the tensors of all, which may differ in size."""
        result = outputs[0] if len(outputs) == 1 else [tensor for row in outputs for tensor in row]
        prepared = self.devices.prepared(list(result), tensors)
        calls = [self._gathered(prepared, list(row), tensor) for row, tensor in zip(outputs, tensors, strict=True)]
        return self._submit(calls, prepared, opts)

    def allgather_coalesced(self, lists: Sequence[_Tensors], tensors: _Tensors, opts: object = None) -> Work:
        """All ranks get several tensors of all: `lists[rank][number]`."""
        prepared = self.devices.prepared([tensor for row in lists for tensor in row], tensors)
        calls = [
            self._gathered(prepared, [row[number] for row in lists], tensor) for number, tensor in enumerate(tensors)
        ]
        return self._submit(calls, prepared, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: object = None) -> Work:
        """All ranks get the tensors of all in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, tensors: _Tensors, opts: object = None) -> Work:
        """As `all_gather_single` for several tensors."""
        prepared = self.devices.prepared(list(outputs), outputs)
        calls = []
        for output, tensor in zip(outputs, tensors, strict=True):
            spans = parts(prepared.write(output), self._count)
            element = element_of(tensor, reduced=False)
            calls.append(Call(op=Op.ALL_GATHER, element=element, inputs=[prepared.read(tensor)], outputs=spans))
        return self._submit(calls, prepared, opts)

    def _gathered(self, prepared: Prepared, row: list[torch.Tensor], tensor: torch.Tensor) -> Call:
        outputs = [prepared.write(output) for output in row]
        element = element_of(tensor, reduced=False)
        return Call(op=Op.ALL_GATHER, element=element, inputs=[prepared.read(tensor)], outputs=outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: object = None,
    ) -> Work:
        """Rank i gets part i of every rank's tensor; parts are rows, equal or as the split sizes say."""
        prepared = self.devices.prepared([output], [tensor])
        call = Call(op=Op.ALL_TO_ALL, element=element_of(tensor, reduced=False))
        call.inputs = rows(prepared.read(tensor), tensor, splits=input_split_sizes, count=self._count)
        call.outputs = rows(prepared.write(output), output, splits=output_split_sizes, count=self._count)
        return self._submit([call], prepared, opts)

    def alltoall(self, outputs: _Tensors, tensors: _Tensors, opts: object = None) -> Work:
        """Rank i gets tensor i of every rank's list."""
        prepared = self.devices.prepared(list(outputs), outputs)
        call = Call(op=Op.ALL_TO_ALL, element=element_of(tensors[0], reduced=False))
        call.inputs = [prepared.read(tensor) for tensor in tensors]
        call.outputs = [prepared.write(tensor) for tensor in outputs]
        return self._submit([call], prepared, opts)

    def gather(self, outputs: Sequence[_Tensors], tensors: _Tensors, opts: object = None) -> Work:
        """The root gets the tensors of all."""
        root = getattr(opts, "rootRank", 0)
        row = list(outputs[0]) if root == self._own else []
        prepared = self.devices.prepared(row, tensors)
        call = Call(op=Op.GATHER, element=element_of(tensors[0], reduced=False), root=root)
        call.inputs = [prepared.read(tensors[0])]
        call.outputs = [prepared.write(output) for output in row]
        return self._submit([call], prepared, opts)

    def scatter(self, outputs: _Tensors, lists: Sequence[_Tensors], opts: object = None) -> Work:
        """Every rank gets its tensor of the root's list."""
        root = getattr(opts, "rootRank", 0)
        prepared = self.devices.prepared(list(outputs), outputs)
        call = Call(op=Op.SCATTER, element=element_of(outputs[0], reduced=False), root=root)
        call.inputs = [prepared.read(tensor) for tensor in lists[0]] if root == self._own else []
        call.outputs = [prepared.write(outputs[0])]
        return self._submit([call], prepared, opts)

    def barrier(self, opts: object = None) -> Work:
        """Nobody goes on before all have come here."""
        return self._submit([Call(op=Op.BARRIER)], Prepared([]), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a time-out; its error names the group and the call."""
        self.barrier().wait(timeout or timedelta(seconds=self._timeout_s))

    # ------------------------------------------------------------------ from one to one

    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> Work:
        """Sends one tensor to the group rank `dst`."""
        prepared = self.devices.messages(list(tensors), tensors)
        call = Call(op=Op.SEND, element=element_of(tensors[0], reduced=False), peer=dst, tag=tag)
        call.inputs = [prepared.read(tensors[0])]
        return self._submit([call], prepared)

    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> Work:
        """Receives one tensor of exactly this size from the group rank `src`."""
        prepared = self.devices.messages(list(tensors), tensors)
        prepared.from_any = True
        call = Call(op=Op.RECV, element=element_of(tensors[0], reduced=False), peer=src, tag=tag)
        call.outputs = [prepared.write(tensors[0])]
        return self._submit([call], prepared)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Work:
        """Receives one tensor from whoever sends first."""
        return self.recv(tensors, -1, tag)

    # ------------------------------------------------------------------ names of other torch versions

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Ends the group: pending collectives end at once, its links are closed. Idempotent."""
        if self._over:
            return
        self._over = True
        self._fabric.close_group(self._name)
        self.devices.close()
        self._stager.close()
        self._completer.close()
        self._drifting.clear()
        self._on_shutdown()

    def abort(self) -> None:
        """As `shutdown`."""
        self.shutdown()
