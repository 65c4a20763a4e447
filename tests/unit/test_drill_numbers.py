"""Numbers of `keepstep drill` that are none are refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.jobs import drill
from keepstep.errors import UsageError


@pytest.mark.parametrize("numbers", [{"factor": float("nan")}, {"factor": float("inf")}, {"rate": float("nan")}])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, numbers: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="finite"):
        drill("slow-compute", tmp_path, rank=0, **numbers)
