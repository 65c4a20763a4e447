"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["Directory", "Printed", "SettingsFile", "TextOrJson", "settings_from"]


class TextOrJson(StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.")]
Printed = Annotated[TextOrJson, typer.Option("--format", help="text or json.")]
SettingsFile = Annotated[Path | None, typer.Option("--settings", metavar="FILE", help="TOML file of settings.")]


def settings_from(file: Path | None, **overrides: Any) -> Any:
    """The settings in force: defaults, TOML files, then `overrides` that are not None. Raises UsageError."""
    from keepstep.service.settings import load_settings

    return load_settings(file, overrides=overrides)
