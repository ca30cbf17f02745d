"""The status line of the launcher: how many workers run, for how long, and after how many restarts."""

from __future__ import annotations

import io
from typing import NamedTuple

__all__ = ["Status"]


class Status(NamedTuple):
    """The state of a group that the launcher started."""

    alive: int
    workers: int
    elapsed_s: float
    restarts: int = 0
    max_restarts: int = 0
    is_ending: bool = False

    def plain(self, columns: int) -> str:
        """Return the line without styles, cut to that many columns.

        >>> Status(alive=1, workers=2, elapsed_s=3.2, restarts=1, max_restarts=4).plain(columns=80)
        '1/2 workers  3 s  restart 1 of 4'
        """
        return "  ".join(word for word, _ in self._words())[:columns]

    def styled(self, columns: int) -> str:
        """Return the line as rich draws it, with the terminal's own colours; dimmed if rich is not installed."""
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            return f"\x1b[2m{self.plain(columns)}\x1b[0m"
        line = Text(no_wrap=True, end="")
        line.append(" arpc ", style="bold white on blue")
        for word, style in self._words():
            line.append("  ")
            line.append(word, style=style)
        line.truncate(columns)
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=columns)
        with console.capture() as drawn:
            console.print(line, end="")
        return drawn.get()

    def _words(self) -> list[tuple[str, str]]:
        """Return each part of the line, with the style that rich draws it in."""
        is_whole = self.alive == self.workers or self.is_ending
        words = [
            (f"{self.alive}/{self.workers} workers", "bold" if is_whole else "bold red"),
            (f"{self.elapsed_s:.0f} s", "dim"),
        ]
        if self.restarts:
            words.append((f"restart {self.restarts} of {self.max_restarts}", "yellow"))
        if self.is_ending:
            words.append(("ending", "yellow"))
        return words
