"""The part ``carriers``: rates of all contestants at several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kv_link.field import LinkContestant, LinkField
from bench.kv_link.media.memory import MIB
from bench.kv_link.pairs import LinkRun
from bench.kv_link.product.shapes import SHAPES
from bench.kv_link.results import PartResult, middle_rate, rate_rows

SIZES = (1, 4, 16, 64, 256)
QUICK_SIZES = (4, 64)
SHORT_ROUNDS, LONG_ROUNDS, QUICK_ROUNDS = 9, 5, 3
LONG = 64
"""MiB from which on a size has LONG_ROUNDS rounds."""

Runs = dict[str, list[LinkRun]]


def measure(field: LinkField, *, quick: bool) -> PartResult:
    """Let all contestants take turns at each size. Raises RuntimeError."""
    result = PartResult([], [])
    for size in QUICK_SIZES if quick else SIZES:
        rounds = LONG_ROUNDS if size >= LONG else SHORT_ROUNDS
        runs = take_turns(field, size * MIB, QUICK_ROUNDS if quick else rounds)
        for contestant in (c for c in field.without_engines if c.name in runs):
            against = contestant.medium
            reference = middle_rate(runs[against]) if against else 0.0
            result.rows += rate_rows(
                contestant.name, size * MIB, runs[contestant.name], against, reference
            )
    add_aims(result, field.without_engines, runs)
    return result


def take_turns(field: LinkField, nbytes: int, rounds: int) -> Runs:
    """Run all contestants once to warm up, check what bare media have moved, and measure."""
    contestants = [c for c in field.without_engines if fits(c, nbytes)]
    runs: Runs = {contestant.name: [] for contestant in contestants}
    for contestant in contestants:
        field.run(contestant, nbytes)
        if not contestant.carrier:
            field.check(contestant, nbytes)
    for _ in range(rounds):
        for contestant in contestants:
            runs[contestant.name].append(field.run(contestant, nbytes))
    return runs


def fits(contestant: LinkContestant, nbytes: int) -> bool:
    """Return whether a transfer can be that small: the product moves whole blocks."""
    return not contestant.shape or SHAPES[contestant.shape].block_bytes <= nbytes


def add_aims(result: PartResult, contestants: Sequence[LinkContestant], runs: Runs) -> None:
    """Add the aims at the largest size, for the shape of an 8B model."""
    rates = {name: middle_rate(of) for name, of in runs.items()}
    ours = {c.carrier: c for c in contestants if c.shape == "8B" and not c.tls}
    for carrier, share in (("tcp", 0.8), ("nccl", 0.8)):
        if (found := ours.get(carrier)) is not None:
            ratio = rates[found.name] / rates[found.medium]
            result.add_aim(f"{carrier} of the bare {found.medium}", ratio, share)
    if (local := ours.get("local")) is not None:
        least = min(8.0, rates["memcpy"] / 2)
        result.add_aim("local", rates[local.name], least, " GB/s")
    for found in ours.values():
        if found.peer in rates:
            result.add_aim(
                f"{found.carrier} ahead of {found.peer}",
                rates[found.name],
                rates[found.peer],
                " GB/s",
            )
