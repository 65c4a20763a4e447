"""The command line itself: help, versions."""

from __future__ import annotations

from keepstep import __version__
from keepstep.cli import main


def test_nothing_at_all_gives_help(capsys):
    assert main([]) == 2
    assert "Usage: keepstep" in capsys.readouterr().out


def test_the_version_as_an_option(capsys):
    assert main(["--version"]) == 0
    assert f"keepstep {__version__}" in capsys.readouterr().out
