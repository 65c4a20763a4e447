"""One undisturbed run that the disturbed ones are compared with."""

from __future__ import annotations

import pytest
from jobs import RunningJob, run_to_end


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunningJob:
    """The toy job without any fault."""
    return run_to_end(tmp_path_factory.mktemp("undisturbed") / "run", standby=0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The whole list of failures inside a swap takes long; without this a part of it is run."""
    parser.addoption("--every-case", action="store_true", help="failures inside a swap: the whole generated list")
