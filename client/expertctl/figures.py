"""Figures: numbers as people read them. Pure functions, no locale, no colour."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int | float) -> str:
    """Return bytes in binary units with three significant digits or so: `972 KiB`, `1.50 GiB`."""
    value, unit = float(nbytes), 0
    # 1023.9995 would round to "1024": step to the next unit a little early.
    while abs(value) >= 1023.5 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{int(value)} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(n: int) -> str:
    return f"{n:,}"


def share(part: float, whole: float) -> str:
    """Return a percentage, `-` when there is nothing to take a share of."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def seconds(value: float) -> str:
    """Return a short duration: `0.8 ms`, `12.30 s`, `3m05s`, `2h10m`."""
    if value < 0.9995:
        return f"{value * 1e3:.1f} ms"
    if value < 59.995:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def waited(wait_ns: int) -> str:
    """Return the time a worker was blocked on the daemon."""
    return seconds(wait_ns / 1e9)


def bar(part: float, whole: float, width: int) -> str:
    """Return a bar of `width` characters, full when part >= whole."""
    filled = round(width * min(max(part / whole, 0.0), 1.0)) if whole else 0
    return "█" * filled + "░" * (width - filled)
