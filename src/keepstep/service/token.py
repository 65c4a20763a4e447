"""The secret that controller and agents share: a file only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from keepstep.errors import EnvironmentProblem, UsageError

__all__ = ["make_token", "read_token"]

_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096


def make_token(path: Path) -> str:
    """The token in `path`, made (mode 0600) if it is not there. Raises UsageError and EnvironmentProblem."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the token: {error.strerror}", where=str(path)) from error
    token = secrets.token_urlsafe(32)
    with open(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def read_token(path: Path | None) -> str:
    """The token in `path`. Raises UsageError if it is missing, short, or readable by others."""
    if path is None:
        remedy = "copy DIR/token of the controller here (mode 0600) and give --token-file"
        raise UsageError("no token file is given", remedy=remedy)
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        remedy = "copy the controller's token file here, or give --token-file"
        raise UsageError(f"cannot read the token: {error.strerror}", where=str(path), remedy=remedy) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError("others may read the token", where=str(path), remedy=f"chmod 600 {path}")
    if len(text) < _LEAST_CHARACTERS:
        raise UsageError(f"the token is shorter than {_LEAST_CHARACTERS} characters", where=str(path))
    return text
