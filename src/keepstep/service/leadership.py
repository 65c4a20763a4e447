"""Who may give orders for a job: a lease in the state store, whose epoch every order carries.

What a controller decides about membership is appended to the job's stream in its epoch before the orders go out; a
deposed one fails there, and members refuse its orders by their epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform

import msgspec

from keepstep.control.job_state import JobState
from keepstep.errors import AppendConflict, EnvironmentProblem, StaleEpoch, StoreError
from keepstep.service.clock import Clock
from keepstep.store.state_store import StateStore

__all__ = ["Leadership"]

_TTL_S = 15.0
_RENEW_S = 5.0
_log = logging.getLogger(__name__)


class Leadership:
    """The right to lead `job`, held by `holder` in `epoch`. Raises EnvironmentProblem if somebody else holds it."""

    def __init__(self, store: StateStore, job: str, *, holder: str, clock: Clock) -> None:
        self._store = store
        self._stream = f"job/{job}/"
        self._holder = holder
        self._clock = clock
        self._renewed = clock.monotonic()
        lease = store.lead(holder, clock.wall(), ttl_s=_TTL_S)
        if lease.holder != holder and _is_dead(lease.holder):  # its lease ends here and now
            lease = store.lead(holder, max(clock.wall(), lease.expires), ttl_s=_TTL_S)
        if lease.holder != holder:
            raise EnvironmentProblem(
                f"another controller leads job {job}",
                where=lease.holder,
                remedy="stop it, or wait for its lease to end",
            )
        self.epoch = lease.epoch
        self._index = len(store.read(self._stream))
        self._noted: tuple[int, int, int | None] = (-1, -1, None)

    def note(self, state: JobState) -> None:
        """Append what the membership is now, if it changed. Raises StaleEpoch if this controller was deposed."""
        generation = state.change.generation if state.change is not None else state.generation
        now = (state.attempt, generation, state.exit_code)
        if now == self._noted:
            return
        entry = {"attempt": state.attempt, "generation": generation, "version": state.version, "phase": state.phase}
        if state.exit_code is not None:
            entry["exit_code"] = state.exit_code
        self._noted = now
        try:
            self._store.append(self._stream, self._index, data=msgspec.json.encode(entry), epoch=self.epoch)
        except (AppendConflict, StaleEpoch):
            raise
        except StoreError as error:
            _log.error("%s -> training goes on, the job's stream has a gap", error)
        else:
            self._index += 1

    def renew(self) -> None:
        """Keep the lease; costs nothing most of the times."""
        if self._clock.monotonic() - self._renewed >= _RENEW_S:
            self._renewed = self._clock.monotonic()
            with contextlib.suppress(StoreError):  # a full disk: `note` says so when it matters
                self._store.lead(self._holder, self._clock.wall(), ttl_s=_TTL_S)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()


def _is_dead(holder: str) -> bool:
    """Whether `holder` (NODE:PID) is a process of this node that is gone; of other nodes nobody knows."""
    node, _, pid = holder.rpartition(":")
    if node != platform.node() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
