"""Runs the part ``pools``: KV goes from one engine's pool to another's, with each codec."""

from __future__ import annotations

from bench.kv_link.field import LinkContestant, LinkField
from bench.kv_link.media.memory import MIB
from bench.kv_link.pairs import LinkRun
from bench.kv_link.product.pool_engine import CHECK, POOLS
from bench.kv_link.results import PartResult, rate_rows

SIZE = 64 * MIB
ROUNDS, QUICK_ROUNDS = 5, 3
CODECS = ("raw", "fp8")


def measure(field: LinkField, *, quick: bool) -> PartResult:
    """Let all carriers take turns with each codec. Raises RuntimeError, also for wrong KV."""
    runs: dict[tuple[LinkContestant, str], list[LinkRun]] = {
        (contestant, codec): [] for contestant in field.with_engines for codec in CODECS
    }
    for contestant, codec in runs:
        field.run(contestant, SIZE, CHECK, codec)
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for (contestant, codec), taken in runs.items():
            taken.append(field.run(contestant, SIZE, POOLS, codec))
    result = PartResult([], [])
    for (contestant, codec), taken in runs.items():
        result.rows += rate_rows(f"{contestant.name}, {codec}", SIZE, taken, "", 0.0)
    return result
