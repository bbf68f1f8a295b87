"""Medians of runs as rows of the result, and aims with what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.kv_link.media.memory import MIB
from bench.kv_link.pairs import LinkRun
from bench.lib.report import ResultRow, median


class PartResult(msgspec.Struct):
    """Rows of one part, and a line for each aim."""

    rows: list[ResultRow] = []
    aims: list[str] = []

    def add_aim(self, what: str, value: float, least: float, unit: str = "") -> None:
        """Record an aim that ``value`` reaches from ``least`` on."""
        self._add(what, f"{value:.2f}{unit}, at least {least:.2f}{unit}", met=value >= least)

    def add_limit(self, what: str, value: float, most: float, unit: str = "") -> None:
        """Record an aim that ``value`` reaches up to ``most``."""
        self._add(what, f"{value:.1f}{unit}, at most {most:.1f}{unit}", met=value <= most)

    def _add(self, what: str, figures: str, *, met: bool) -> None:
        self.aims.append(f"aim {'met   ' if met else 'MISSED'} {what}: {figures}")


def middle_rate(runs: Sequence[LinkRun]) -> float:
    """Return the median rate in GB/s."""
    return median([run.gb_per_s for run in runs])


def middle_cpu(runs: Sequence[LinkRun]) -> float:
    """Return the median of the CPU seconds per GB."""
    return median([run.cpu_s_per_gb for run in runs])


def rate_rows(
    name: str, nbytes: int, runs: Sequence[LinkRun], against: str, reference: float
) -> list[ResultRow]:
    """Return rows for rate and CPU time; ``reference`` is the rate of ``against`` in GB/s."""
    rate = middle_rate(runs)
    of = f"{against} {reference:.2f} GB/s" if against else ""
    what = f"{name}, {nbytes // MIB} MiB"
    return [
        ResultRow(what, rate, "GB/s", of, rate / reference if against else None),
        ResultRow(what, middle_cpu(runs), "CPU s/GB"),
    ]
