"""Namespaces of a builder that was killed do not stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fabric_lab import remove_left, why_no_fabric


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def test_those_of_a_dead_builder_go_and_those_of_a_live_one_stay() -> None:
    if why := why_no_fabric():
        pytest.skip(why)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left, held, other = f"ks{int(dead.stdout)}-l0", f"ks{os.getpid()}-x0", f"other{os.getpid()}"
    made = (left, held, other)
    try:
        for name in made:
            subprocess.run(["ip", "netns", "add", name], check=True)
        assert left in remove_left()
        assert namespaces() & set(made) == {held, other}
    finally:
        for name in namespaces() & set(made):
            subprocess.run(["ip", "netns", "del", name], check=True)
