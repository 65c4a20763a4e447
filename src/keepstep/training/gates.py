"""What else of this process has to stop at a loss, and to be done before an agreement: calls that run on devices."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Gate", "Gates"]


class Gate(Protocol):
    """The calls on devices of one process group."""

    def stop(self) -> None:
        """A loss: what is pending is ended. From any thread; returns at once."""
        ...

    def settled(self) -> bool:
        """Waits until what was begun is done; False if it was cut."""
        ...


class Gates:
    """All gates of a process."""

    def __init__(self) -> None:
        self._gates: tuple[Gate, ...] = ()

    def append(self, gate: Gate) -> None:
        """From now on `gate` is asked."""
        self._gates = (*self._gates, gate)

    def remove(self, gate: Gate) -> None:
        """`gate` is asked no more."""
        self._gates = tuple(one for one in self._gates if one is not gate)

    def stop(self) -> None:
        """Stops all."""
        for gate in self._gates:
            gate.stop()

    def settled(self) -> bool:
        """Whether all are settled."""
        return all(gate.settled() for gate in self._gates)
