"""Structured logs: JSON lines in DIR/logs/keepstep.jsonl, plain lines on the console, one level for both."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from keepstep.service.output import Console, LogFile

__all__ = ["close_logs", "open_logs"]

_ROOT = "keepstep"


class _JsonLines(logging.Handler):
    """One JSON object a record: wall-clock time, level, logger, text."""

    def __init__(self, path: Path, console: Console) -> None:
        super().__init__()
        self._file = LogFile(path, on_trouble=lambda text: console.say(f"keepstep: {text}", error=True))

    def emit(self, record: logging.LogRecord) -> None:
        line = {
            "wall": record.created,
            "level": record.levelname.lower(),
            "from": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
        super().close()


class _ConsoleLines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(f"keepstep: {record.getMessage()}", error=True)


def open_logs(level: str, *, console: Console, directory: Path) -> None:
    """Send the log of this process to `console` and to keepstep.jsonl in `directory`."""
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.addHandler(_JsonLines(directory / "keepstep.jsonl", console))
    logger.addHandler(_ConsoleLines(console))


def close_logs() -> None:
    """Take the handlers away again."""
    logger = logging.getLogger(_ROOT)
    for handler in tuple(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
