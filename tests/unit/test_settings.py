"""Settings: precedence, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.service.settings import Settings, load_settings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def load(tmp_path: Path, *, here: str = "", named: str | None = None, **overrides: object) -> Settings:
    default = written(tmp_path / "keepstep.toml", here)
    file = None if named is None else written(tmp_path / "named.toml", named)
    return load_settings(file, overrides=dict(overrides), default=default)


def test_defaults_without_any_file(tmp_path):
    assert load_settings(None, overrides={}, default=tmp_path / "none.toml") == Settings()


def test_each_source_wins_over_the_next(tmp_path):
    here = "standby = 1\nnproc_per_node = 2\nmax_restarts = 3"
    found = load(tmp_path, here=here, named="standby = 4\nnproc_per_node = 5", standby=6, max_restarts=None)
    assert (found.standby, found.nproc_per_node, found.max_restarts) == (6, 5, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stanby = 1", "stanby"),
        ("standby = -1", "standby"),
        ("standby = 'one'", "standby"),
        ("log_level = 'loud'", "log_level"),
        ("standby =", "not TOML"),
        ("\xff", "not TOML"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, text, says):
    (tmp_path / "named.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        load_settings(tmp_path / "named.toml", overrides={}, default=tmp_path / "none.toml")
    assert says in str(caught.value) and "named.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml"):
        load_settings(tmp_path / "none.toml", overrides={})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1, got 0"),
        ({"ring_slots": 1 << 30}, f"ring_slots must be at most {1 << 22}, got {1 << 30}"),
        ({"patience_s": 0.0}, "patience_s must be more than 0"),
    ],
)
def test_a_number_out_of_range_is_said_in_plain_words(tmp_path, overrides, says):
    with pytest.raises(UsageError, match=says):
        load(tmp_path, **overrides)


def test_a_bad_value_on_the_command_line_says_so(tmp_path):
    with pytest.raises(UsageError, match="command line"):
        load(tmp_path, nproc_per_node=0)
