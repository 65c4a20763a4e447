"""`pytest tests/scenarios --rewrite` writes what the machines do now into the transcripts; review it as a diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption("--rewrite", action="store_true", help="write transcripts anew instead of comparing them")


@pytest.fixture
def rewrite(request) -> bool:
    return request.config.getoption("--rewrite", default=False)
