"""A copy of the state that is made while training goes on, from a step boundary to the next update.

Between two updates weights and optimizer state do not change; everything else may, and is copied at once. Whoever is
about to update waits for `copied`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepstep.training.host_memory import Block, copy_bytes
from keepstep.training.manifest import Image

__all__ = ["StateCopy"]

_STILL = ("parameters.", "optimizers.")
_PIECE = 8 * 1024 * 1024


class StateCopy:
    """The state of `version` on its way into `block`. `private` is what only this rank knows."""

    def __init__(self, image: Image, block: Block, *, version: int, private: bytes) -> None:
        self.manifest = image.manifest
        self.version = version
        self.private = private
        self.block = block
        self._image: Image | None = image
        self._later: list[tuple[memoryview, memoryview]] = []
        self._copied = threading.Event()
        at = 0
        for entry, source in zip(image.manifest.entries, image.buffers, strict=True):
            target = block.view[at : at + entry.nbytes]
            at += entry.nbytes
            if entry.name.startswith(_STILL) and ".groups[" not in entry.name:
                self._later.append((target, source))
            else:
                copy_bytes(target, source)

    def run(self, whole: Callable[[], object] | None = None) -> None:
        """Copy the rest; once, in any thread. `whole` is called when that is done, before the state may change."""
        for target, source in self._later:
            for at in range(0, len(source), _PIECE):
                copy_bytes(target[at : at + _PIECE], source[at : at + _PIECE])
        self._later.clear()
        self._image = None
        if whole is not None:
            whole()
        self._copied.set()

    def wait(self) -> None:
        """Return when the state may change."""
        self._copied.wait()

    def views(self) -> list[memoryview]:
        """The bytes of every entry, in the order of the manifest; whole when `run` has returned."""
        found, at = [], 0
        for entry in self.manifest.entries:
            found.append(self.block.view[at : at + entry.nbytes])
            at += entry.nbytes
        return found

    @property
    def done(self) -> bool:
        """Whether the state may change."""
        return self._copied.is_set()
