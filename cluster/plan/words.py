"""Figures as a reader wants them. Pure."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "grows without end"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    """Of ``count`` bytes."""
    if count < 2**20:
        return f"{count / 2**10:.4g} KiB"
    exponent, unit = next((e, u) for e, u in _UNITS if count >= 1000 * 2 ** (e - 10) or e == 20)
    value = count / 2**exponent
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"))


def speed(value: float) -> str:
    return f"{value:.3g} GB/s"


def usd(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
