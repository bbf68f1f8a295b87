"""Whether the generator itself was the bottleneck: pure functions of what it measured of itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.serve.figures import Quantiles, quantiles
from bench.serve.records import Record

LAG_MS = 20.0
CPU_SHARE = 0.85


class Health(msgspec.Struct, frozen=True):
    """``lag_ms``: from due to sent, of requests that no bound held back. ``held``: how many a bound
    held back. ``cpu_share``: of one core, over the run."""

    lag_ms: Quantiles | None
    held: int
    cpu_share: float
    warnings: list[str]


def health(records: Sequence[Record], cpu_s: float, wall_s: float, max_in_flight: int) -> Health:
    sent = [r for r in records if r.sent >= 0]
    held = sum(r.held for r in sent)
    lag = quantiles([1e3 * (r.sent - r.due) for r in sent if not r.held])
    share = cpu_s / wall_s if wall_s > 0 else 0.0
    warnings = []
    if lag is not None and lag.p99 > LAG_MS:
        warnings.append(
            f"the generator was late: 1% of the requests were sent more than {lag.p99:.0f} ms after"
            " they were due; ask for less, or give it more processor"
        )
    if share > CPU_SHARE:
        warnings.append(
            f"the generator used {share:.0%} of a core: latencies may be its own; ask for less, or"
            " run several"
        )
    if held:
        warnings.append(
            f"{held} requests waited because {max_in_flight} were in flight already; their times"
            " count from when they were due; see --max-in-flight"
        )
    return Health(lag, held, share, warnings)
