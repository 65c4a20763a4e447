"""A script that needs the data plane is not started without it."""

from __future__ import annotations

import pytest

from keepstep.errors import EnvironmentProblem
from keepstep.service import launcher


@pytest.mark.parametrize(
    "text", ["import keepstep\n", "import os, keepstep\n", "if 1:\n    from keepstep import join\n"]
)
def test_a_script_that_imports_keepstep_is_refused_without_the_library(tmp_path, monkeypatch, text):
    (script := tmp_path / "train.py").write_text(text)
    launcher.needs_library(str(script))
    monkeypatch.setattr(launcher, "plane_library", lambda: None)
    with pytest.raises(EnvironmentProblem, match=r"not built.*pip install") as caught:
        launcher.needs_library(str(script))
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("text", ["import os  # keepstep\n", "# keepstep starts this\n", "import keepsteps\n"])
def test_a_plain_script_needs_none(tmp_path, monkeypatch, text):
    (script := tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(launcher, "plane_library", lambda: None)
    launcher.needs_library(str(script))
    script.write_text("import keepstep")
    with pytest.raises(EnvironmentProblem):
        launcher.needs_library(str(script))
