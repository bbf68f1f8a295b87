"""What tokens cost. Pure."""

from __future__ import annotations

import msgspec

from cluster.plan.pools import Sized, Wanted

_MILLIONS_AN_HOUR = 3600.0 / 1e6


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """In USD: an hour of all GPUs, and a million tokens. Prompts pay for the prefill pool, cached
    tokens as much as others; answers for the decode pool; ``blended`` is of both together."""

    hour: float
    prompt_tokens: float
    output_tokens: float
    blended: float


def cost(wanted: Wanted, of: Sized) -> Cost | None:
    """None where a GPU's price is not known."""
    hour = of.usd_per_hour
    if hour is None:
        return None
    load = wanted.workload
    prompts = load.mix.rate * load.prompt * _MILLIONS_AN_HOUR
    outputs = load.mix.rate * load.output * _MILLIONS_AN_HOUR
    each = {role: pool.workers * (pool.gpu.usd_per_hour or 0.0) for role, pool in of.pools.items()}
    return Cost(
        hour=hour,
        prompt_tokens=each["prefill"] / prompts,
        output_tokens=each["decode"] / outputs,
        blended=hour / (prompts + outputs),
    )
