"""The device communicator of one process group: made, ended and made again with the group's membership.

NOT RUN ON GPUs. At its first call on device memory in a generation a group decides in common, over its own data plane,
whether its communicator is whole, is shrunk and grown, or is made anew; other groups are not touched. A loss ends
pending work by revoke or abort, and pending calls complete with unspecified data, as they do everywhere.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from keepstep.errors import TransportError
from keepstep.training.comm_library import (
    REVOKE,
    CommLibrary,
    CommState,
    Formation,
    How,
    Report,
    Step,
    formation_of,
)
from keepstep.training.comm_steps import steps_of
from keepstep.training.copier import Event
from keepstep.training.direct_work import Blame, DirectPrepared, DirectWork
from keepstep.training.plane import Call

__all__ = ["Communicator", "Group"]

_log = logging.getLogger("keepstep")
_POLL_S = 0.001
_MOST_POLLS = 60_000
_END_LIMIT_S = 20.0
_TOO_LONG = f"a device communicator was not ended within {_END_LIMIT_S:.0f} s"
_ID_BYTES = 128


class Group(Protocol):
    """What a communicator needs of its group: the generation, whether it still runs, and `exchange`."""

    @property
    def generation(self) -> int:
        """The installed generation."""
        ...

    @property
    def live(self) -> bool:
        """Whether collectives run: no loss was heard of and this is no rehearsal."""
        ...

    @property
    def exposed(self) -> bool:
        """Whether nobody can do a call again that a loss cuts now: it has to raise."""
        ...

    def exchange(self, data: bytes) -> list[bytes] | None:
        """Gives everybody's `data` of one size in the order of roles; None if a loss cut it."""
        ...


class _Lost(Exception):
    """A loss came in between."""


def _give_up(why: str) -> None:
    """A device that cannot be got back makes this process useless: it ends, and is replaced like any lost member."""
    _log.critical("%s; this process ends", why)
    os._exit(70)


class Communicator:
    """For the role `own` of a group; `library` is None where there is none. Calls come from one thread at a time;
    `stop` may come from any."""

    def __init__(
        self,
        group: Group,
        library: CommLibrary | None,
        *,
        own: int,
        device: bytes,
        give_up: Callable[[str], None] = _give_up,
    ) -> None:
        self._group, self._library, self._own, self._device = group, library, own, device
        self._give_up = give_up
        self._comm: int | None = None
        self._order: tuple[int, ...] = ()
        self._serial = 0
        self._revoked = False
        self._decided = -1
        self._usable = False
        self._pending: list[DirectWork] = []
        self._stopped = threading.Event()
        self._cut = self._enqueuing = self._closed = False
        self._ending: list[threading.Thread] = []
        self._lock, self._end_lock = threading.Lock(), threading.Lock()
        self.history: list[How] = []

    @property
    def order(self) -> tuple[int, ...]:
        """The role of each rank of the communicator."""
        return self._order

    # ------------------------------------------------------------------ coming to a common one

    def ready(self) -> bool:
        """Whether calls run on the communicator; else they go through host memory. A collective of the group at its
        first call in a generation."""
        if not self._group.live:
            return False
        generation = self._group.generation
        if self._decided == generation:
            return self._usable
        self._stopped, self._cut = threading.Event(), False
        if not self._group.live:  # the loss told `stop` before this
            self._stopped.set()
            return False
        try:
            self._await_ends()
            self._usable = self._agree()
            self._decided = generation
        except _Lost:
            self._usable = False
        return self._usable

    def _agree(self) -> bool:
        plan = formation_of([Report.unpack(one) for one in self._exchange(self._report().pack())])
        if plan.how is How.GROW and not self._form(plan):
            plan = formation_of([Report.unpack(one) for one in self._exchange(self._report().pack())], may_grow=False)
        if plan.how is How.REBUILD and not self._form(plan):
            plan = Formation(How.HOST)
            _log.warning("no common device communicator: tensors on devices go through host memory")
        self.history.append(plan.how)
        if plan.how is How.HOST:
            self._drop_own()
        return plan.how is not How.HOST

    def _report(self) -> Report:
        version = 0 if self._library is None else self._library.version
        if self._comm is None:
            return Report(version, self._device, 0, -1, False, False)
        rank = self._order.index(self._own)
        return Report(version, self._device, self._serial, rank, not self._revoked, self._revoked)

    def _form(self, plan: Formation) -> bool:
        """Makes the communicator of `plan`; False if any member could not."""
        made: int | None = None
        try:
            made = self._grown(plan) if plan.how is How.GROW else self._rebuilt(plan)
        except TransportError as error:
            _log.warning("a device communicator could not be made: %s", error)
        except _Lost:
            self._drop_own()
            raise
        everybody = all(flag == b"\1" for flag in self._exchange(b"\0" if made is None else b"\1", made))
        self._drop_own()
        if not everybody:
            self._end(made)
            return False
        self._comm, self._order, self._serial = made, plan.order, plan.serial
        return True

    def _rebuilt(self, plan: Formation) -> int:
        library, failure = self._library, None
        assert library is not None
        self._drop_own()
        own = b""
        try:
            own = library.unique_id(None) if self._own == plan.order[0] else b""
        except TransportError as error:
            failure = error
        identity = self._identity(own, plan, failure=failure)
        made = self._begun(lambda: library.form(identity, size=len(plan.order), rank=plan.order.index(self._own)))
        assert made is not None
        return self._made(made)

    def _grown(self, plan: Formation) -> int:
        """Shrinks what is left of the old one, then lets the newcomers in. The old one is aborted, never destroyed."""
        library, failure = self._library, None
        assert library is not None
        old, own = self._comm, b""
        self._settle()
        shrunk = self._begun(
            lambda: None if old is None else library.shrink(old, excluded=plan.excluded, abort=plan.abort)
        )
        try:
            if shrunk is not None:
                held, shrunk = shrunk, None
                shrunk = self._made(held)
                self._drop_own()
                own = library.unique_id(shrunk) if self._own == plan.order[0] else b""
        except TransportError as error:
            failure = error
        identity = self._identity(own, plan, failure=failure, held=shrunk)
        rank, size = plan.order.index(self._own), len(plan.order)
        wanted = identity if shrunk is None or own else None
        try:
            made = self._begun(lambda: library.grow(shrunk, size=size, rank=rank, unique_id=wanted))
            assert made is not None
            return self._made(made)
        finally:
            self._end(shrunk)

    def _identity(
        self, own: bytes, plan: Formation, *, failure: TransportError | None, held: int | None = None
    ) -> bytes:
        """The unique id from the plan's first member. If a member failed before, `held` is ended: TransportError."""
        answers = self._exchange(bytes([failure is None]) + own.ljust(_ID_BYTES, b"\0"), held)
        if failure is not None or any(one[0] == 0 for one in answers):
            self._end(held)
            raise failure or TransportError("another member could not go on")
        return answers[plan.order[0]][1:]

    def _begun(self, begin: Callable[[], int | None]) -> int | None:
        """What `begin` began, once all members have begun; else nobody waits for the others in vain. A newcomer may
        have nothing to begin. Raises TransportError if any member could not."""
        made: int | None = None
        failure: TransportError | None = None
        try:
            made = begin()
        except TransportError as error:
            failure = error
        answers = self._exchange(bytes([failure is None]), made)
        if failure is not None or any(one[0] == 0 for one in answers):
            self._end(made)
            raise failure or TransportError("another member could not begin")
        return made

    def _made(self, comm: int) -> int:
        """Waits until `comm` is there. Raises TransportError if it failed or took a minute; ends it then, and where a
        loss came."""
        assert self._library is not None
        polls = _MOST_POLLS
        while (state := self._library.state(comm)) is CommState.WORKING and self._group.live and polls:
            self._stopped.wait(_POLL_S)
            polls -= 1
        if state is CommState.READY and self._group.live:
            return comm
        self._end(comm)
        if not self._group.live:
            raise _Lost
        raise TransportError("the library reports a failure" if polls else "it was not made within a minute")

    def _exchange(self, data: bytes, held: int | None = None) -> list[bytes]:
        """`Group.exchange`; where a loss cuts it, `held` is ended."""
        answers = self._group.exchange(data)
        if answers is None:
            self._end(held)
            raise _Lost
        return answers

    # ------------------------------------------------------------------ calls

    def run(self, calls: Sequence[Call], prepared: DirectPrepared, *, blame: Blame) -> DirectWork:
        """Enqueues `calls` beside the user's stream, in its order. Only after `ready`."""
        library, comm = self._library, self._comm
        assert library is not None and comm is not None
        steps = [step for call in calls for step in steps_of(call, self._own, order=self._order)]
        event: Event | None = None
        if not self._stopped.is_set():
            event = prepared.copier.launch(lambda stream: self._enqueue(comm, steps, stream=stream), prepared.copy_back)
        work = DirectWork(prepared, event, exposed=lambda: self._group.exposed, blame=blame)
        with self._lock:
            self._enqueuing = False
            self._pending = [one for one in self._pending if not one.past()]
            self._pending.append(work)
        if self._stopped.is_set():  # the loss may have come before anybody saw this call
            work.cut = True
            self._cut_off()
        return work

    def _enqueue(self, comm: int, steps: Sequence[Step], *, stream: object) -> None:
        """Returns once the library has enqueued everything, or a loss came."""
        assert self._library is not None
        with self._lock:
            if self._stopped.is_set():
                return
            self._enqueuing = True
            self._library.run(comm, steps, stream=stream)
        while True:
            with self._lock:
                if self._stopped.is_set() or self._library.state(comm) is not CommState.WORKING:
                    return
            self._stopped.wait(_POLL_S)

    def settled(self) -> bool:
        """Before an agreement: waits until all that was enqueued is done; False if it was cut or failed."""
        self._settle()
        if self._decided != self._group.generation:
            return True  # no call yet in this generation
        if self._stopped.is_set():
            return False
        return self._comm is None or self._library is None or self._library.state(self._comm) is not CommState.FAILED

    def _settle(self) -> None:
        with self._lock:
            pending = tuple(self._pending)  # they stay in the list: a loss has to find them
        for work in pending:
            work.await_device()
        with self._lock:
            self._pending = [one for one in self._pending if not one.past()]

    # ------------------------------------------------------------------ ends

    def stop(self) -> None:
        """A loss: pending work is ended, by revoke where the library has it, else by abort. Returns at once."""
        self._stopped.set()
        self._cut_off()

    def _cut_off(self) -> None:
        """Ends pending work once. What is not busy stays as it is, and may be kept if it is whole everywhere."""
        with self._lock:
            comm, library = self._comm, self._library
            left = [one for one in self._pending if not one.past()]
            for one in left:
                one.cut = True
            busy = self._enqueuing or bool(left)
            if self._cut or not busy or comm is None or library is None:
                return
            self._cut, self._revoked = True, library.version >= REVOKE
            if not self._revoked:
                self._comm = None
        self._end(comm, by=self._limited(self._revoke if self._revoked else library.abort))

    def _limited(self, end: Callable[[int], None]) -> Callable[[int], None]:
        """`end` for a call that is pending: if it hangs the process gives up, since the device may stand until it is
        ended, and whoever waits for the device with it."""

        def ended(comm: int) -> None:
            limit = threading.Timer(_END_LIMIT_S, self._too_long)
            limit.daemon = True
            limit.start()
            try:
                end(comm)
            finally:
                limit.cancel()

        return ended

    def _too_long(self) -> None:
        if not self._closed:
            self._give_up(_TOO_LONG)

    def _revoke(self, comm: int) -> None:
        assert self._library is not None
        try:
            self._library.revoke(comm)
        except TransportError as error:
            _log.warning("a device communicator could not be revoked and is aborted: %s", error)
            with self._lock:
                if self._comm == comm:
                    self._comm, self._revoked = None, False
            self._library.abort(comm)

    def close(self) -> None:
        """The group is over; nobody waits for what is ended now."""
        self._closed = True
        self.stop()
        self._drop_own()

    def _drop_own(self) -> None:
        """Ends the communicator that is held."""
        comm, self._comm, self._revoked = self._comm, None, False
        self._end(comm)

    def _end(self, comm: int | None, by: Callable[[int], None] | None = None) -> None:
        """Aborts (or ends otherwise) in a thread of its own, since that may hang."""
        if comm is None or self._library is None:
            return
        end = by or self._library.abort
        with self._end_lock:
            earlier = [one for one in self._ending if one.is_alive()]
            thread = threading.Thread(
                target=self._end_now, args=(lambda: end(comm), earlier), name="keepstep-end", daemon=True
            )
            thread.start()
            self._ending = [*earlier, thread]

    def _end_now(self, end: Callable[[], None], earlier: list[threading.Thread]) -> None:
        for thread in earlier:  # a revoke may still be under way
            thread.join()
        try:
            end()
        except TransportError as error:
            _log.warning("a device communicator did not end well: %s", error)

    def _await_ends(self) -> None:
        with self._end_lock:
            ending, self._ending = self._ending, []
        for thread in ending:
            thread.join(_END_LIMIT_S)
            if thread.is_alive():
                self._give_up(_TOO_LONG)
                raise TransportError("a device communicator cannot be ended")
