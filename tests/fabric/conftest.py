"""A real fabric of network namespaces; skipped where the machine does not allow one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from fabric_lab import Fabric, FabricPlan, why_no_fabric


@pytest.fixture
def fabrics() -> Iterator[Callable[[FabricPlan], Fabric]]:
    why = why_no_fabric()
    if why:
        pytest.skip(why)
    made: list[Fabric] = []

    def make(plan: FabricPlan) -> Fabric:
        made.append(Fabric(plan).__enter__())
        return made[-1]

    yield make
    for fabric in made:
        fabric.close()


@pytest.fixture
def python() -> list[str]:
    """How to run a piece of Python in a namespace."""
    return [sys.executable, "-c"]
