"""A plan as a scenario that `baton simulate` takes: the same machines, pools and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.planner.plan import Plan
from cluster.planner.pools import Pool
from cluster.planner.request import Asked
from cluster.planner.workload import length
from cluster.workloads.lengths import Fixed, Length, LogNormal, Uniform
from protocol.errors import StartupError

SECONDS = 600.0


def scenario(asked: Asked, of: Plan) -> dict[str, Any]:
    """Cached tokens come as a prefix that all prompts share, of the mean cached length."""
    pools = of.sized.pools
    goals = of.wanted.goals
    return {
        "name": "plan",
        "machines": {
            **{role: _machine(pool) for role, pool in pools.items()},
            "pace": max(1.0, of.sized.pace),
        },
        "pools": {role: pool.workers for role, pool in pools.items()},
        "objectives": {"ttft_ms": goals.ttft_s * 1e3, "tpot_ms": goals.tpot_s * 1e3},
        "traffic": _trace(asked) if asked.trace is not None else _mix(asked, of),
        "autoscaler": {"mode": "off"},
        **({} if asked.trace is not None else {"seconds": SECONDS}),
    }


def _machine(pool: Pool) -> dict[str, Any]:
    of = pool.machine
    return {
        "step": [float(c) for c in of.step],
        "chunk": of.chunk,
        "max_batch": of.max_batch,
        "kv_tokens": of.kv_tokens,
        "kv_bytes": of.kv_bytes,
        "link_gb_per_s": of.link_bytes_s / 1e9,
    }


def _trace(asked: Asked) -> dict[str, Any]:
    assert asked.trace is not None
    if asked.rate is not None:
        raise StartupError("--scenario: a trace has its own rate; use --scale instead of --rate")
    return {"trace": str(asked.trace.resolve()), "speed": asked.scale}


def _mix(asked: Asked, of: Plan) -> dict[str, Any]:
    assert asked.prompt is not None and asked.output is not None
    load = of.wanted.workload
    mix: dict[str, Any] = {
        "rate": load.mix.rate,
        "prompt": _length(length(asked.prompt, "--prompt")),
        "output": _length(length(asked.output, "--output")),
    }
    if cached := round(load.prompt * load.shared):
        mix["prefix"] = cached
    return {"mixes": [mix]}


def _length(of: Length) -> str | int:
    match of:
        case Fixed(tokens):
            return tokens
        case Uniform(low, high):
            return f"uniform:{low}-{high}"
        case LogNormal(mean, sigma, most):
            return f"lognormal:{mean:g},{sigma:.6g},{most}"


def write_scenario(path: Path, asked: Asked, of: Plan) -> None:
    """Raises StartupError."""
    text = yaml.safe_dump(scenario(asked, of), sort_keys=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
