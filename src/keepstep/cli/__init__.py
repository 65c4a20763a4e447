"""The command line: parse, call one function, print. One module a family of commands, put together in `entry`.

Nothing heavy is imported before a command is chosen.
"""

from keepstep.cli.entry import app, main

__all__ = ["app", "main"]
