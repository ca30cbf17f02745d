"""Numbers as text, for users of a terminal."""

from __future__ import annotations

__all__ = ["age", "bytes_", "count", "duration", "rate"]


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """Format a count.

    >>> count(999), count(1234), count(5_600_000)
    ('999', '1.2k', '5.6M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{_trimmed(value / size, 1)}{unit}"
    return _trimmed(value, 0 if value >= 10 else 1)


def rate(per_s: float) -> str:
    """Format a count per second."""
    return "<0.1" if 0 < per_s < 0.1 else count(per_s)


def bytes_(value: float) -> str:
    """Format an amount of memory.

    >>> bytes_(512), bytes_(240 << 20)
    ('512 B', '240 MiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{_trimmed(value / size, 1 if value < 10 * size else 0)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Format the duration of a call; ``-`` if there is none.

    >>> duration(0.0000042), duration(0.0123), duration(2.5), duration(None)
    ('4.2 µs', '12.3 ms', '2.5 s', '-')
    """
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{_trimmed(seconds * 1e6, 1 if seconds < 1e-5 else 0)} µs"
    if seconds < 1:
        return f"{_trimmed(seconds * 1e3, 1)} ms"
    return f"{_trimmed(seconds, 1)} s"


def age(seconds: float) -> str:
    """Format the time for which something has existed.

    >>> age(0.2), age(75), age(7300)
    ('<1 s', '1 min', '2 h 1 min')
    """
    if seconds < 1:
        return "<1 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds // 86400:.0f} d"
