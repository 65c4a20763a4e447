"""The secret of controller and agents: only its owner may read it."""

from __future__ import annotations

import pytest

from keepstep.errors import EnvironmentProblem, UsageError
from keepstep.service.token import make_token, read_token


def test_a_made_token_is_private_and_stays_the_same(tmp_path):
    path = tmp_path / "token"
    token = make_token(path)
    assert len(token) >= 32 and path.stat().st_mode & 0o777 == 0o600
    assert make_token(path) == token == read_token(path)


@pytest.mark.parametrize(("text", "mode", "says"), [("x" * 40, 0o644, "others may read"), ("short", 0o600, "shorter")])
def test_a_bad_token_is_refused(tmp_path, text, mode, says):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError, match=says):
        read_token(path)


def test_no_token(tmp_path):
    with pytest.raises(UsageError, match="token-file"):
        read_token(None)
    with pytest.raises(UsageError, match="cannot read"):
        read_token(tmp_path / "none")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        make_token(tmp_path / "none" / "token")
