"""Figures as a reader wants them. Pure."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "grows without end"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.4g} KiB"


def speed(value: float) -> str:
    return f"{value:.3g} GB/s"


def usd(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
