"""Completion for fish, which shtab does not write: one line for each command and each option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

__all__ = ["fish_completion"]


def fish_completion(parser: argparse.ArgumentParser) -> str:
    """What fish has to read to complete a command: ``arpc --print-completion fish | source``."""
    return "\n".join(_lines(parser))


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    name = parser.prog
    yield f"complete -c {name} -e"
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them, and shtab does the same
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for command, one in action.choices.items():
                about = _quoted(helps.get(command, ""))
                yield f"complete -c {name} -n __fish_use_subcommand -f -a {command} -d {about}"
                for option in one._actions:  # noqa: SLF001
                    yield from _option(name, f"-n '__fish_seen_subcommand_from {command}' ", option)
        else:
            yield from _option(name, "-n __fish_use_subcommand ", action)


def _option(name: str, condition: str, action: argparse.Action) -> Iterator[str]:
    if not action.option_strings or action.help == argparse.SUPPRESS:
        return
    words = [f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in action.option_strings]
    if action.choices is not None:
        words.append(f"-x -a {_quoted(' '.join(map(str, action.choices)))}")
    elif action.nargs != 0:
        words.append("-r")
    yield f"complete -c {name} {condition}{' '.join(words)} -d {_quoted((action.help or '').replace('%%', '%'))}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
