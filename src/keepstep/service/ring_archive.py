"""What recorder rings tell after a loss, and their copies: DIR/incidents/N/ at losses, DIR/rings/ at the end."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepstep.diagnosis.onset import onset_of_loss
from keepstep.errors import RecordError
from keepstep.records.ring import Ring, decode_ring, read_private
from keepstep.service.clock import Clock
from keepstep.service.ring_memory import RingMemory

__all__ = ["INCIDENTS_FOLDER", "MAX_INCIDENTS", "RINGS_FOLDER", "RingArchive"]

INCIDENTS_FOLDER = "incidents"
RINGS_FOLDER = "rings"
MAX_INCIDENTS = 100
"""Rings of later incidents of one run are not kept: they would fill the disk."""
_SAME_INCIDENT_S = 2.0
_TAIL_SLOTS = 256
"""Slots looked at for the onset: the last step or two, read in a few milliseconds."""
_log = logging.getLogger(__name__)


class RingArchive:
    """Reads rings at once and writes copies from a thread, so that no recovery waits for a disk."""

    def __init__(self, directory: Path, *, clock: Clock) -> None:
        """Copies go below the run directory `directory`: incidents/1, 2, ... (losses within two seconds share a
        number), and rings/."""
        self._directory = directory
        self._clock = clock
        self._number = 0
        self._last = float("-inf")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="keepstep-rings")

    def last_words(self, member: str, rings: Mapping[str, RingMemory]) -> tuple[dict[int, bytes], float]:
        """What `member` published last, by version, and the wall-clock time of the first collective out of pattern."""
        tails: list[Ring] = []
        private: dict[int, bytes] = {}
        for name, ring in rings.items():
            with ring.view() as view, contextlib.suppress(RecordError):
                tails.append(decode_ring(view, newest=_TAIL_SLOTS))
                if name == member:
                    private = read_private(view)
        return private, onset_of_loss(tails)

    def save(self, rings: Mapping[str, RingMemory]) -> None:
        """Keep copies of all rings of this node for the present incident; the first copy of a ring is kept."""
        now = self._clock.monotonic()
        if now - self._last > _SAME_INCIDENT_S:
            self._number += 1
        self._last = now
        if self._number <= MAX_INCIDENTS:
            copies = {name: ring.snapshot() for name, ring in rings.items()}
            self._writer.submit(_write, self._directory / INCIDENTS_FOLDER / str(self._number), copies)

    def save_last(self, rank: int, ring: RingMemory) -> None:
        """Keep a copy of the ring of `rank`, whose process has ended, in place of that of an earlier process."""
        self._writer.submit(_put, self._directory / RINGS_FOLDER / f"rank{rank}.ring", ring.snapshot())

    def close(self) -> None:
        """Wait for copies on their way to the disk."""
        self._writer.shutdown(wait=True)


def _write(directory: Path, copies: Mapping[str, bytes]) -> None:
    with contextlib.suppress(FileExistsError):
        for name, data in copies.items():
            path = directory / f"{name}.ring"
            try:
                directory.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError as error:
                _log.warning("cannot keep ring %s: %s", path, error.strerror)
                return


def _put(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what was there."""
    begun = path.with_suffix(".begun")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun.write_bytes(data)
        os.replace(begun, path)
    except OSError as error:
        _log.warning("cannot keep ring %s: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            begun.unlink(missing_ok=True)
