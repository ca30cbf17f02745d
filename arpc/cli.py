"""The command ``arpc``, as ``python -m arpc`` finds it. It is in `arpc_cli`, outside of what takes torch to import."""

from arpc_cli import COMMANDS, Command, main

__all__ = ["COMMANDS", "Command", "main"]
