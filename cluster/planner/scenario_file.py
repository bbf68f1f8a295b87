"""Writes a plan as a scenario for `baton simulate`: the same machines, pools and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.planner.plan import DeploymentPlan
from cluster.planner.pools import PoolPlan
from cluster.planner.request import PlanOptions
from cluster.planner.workload import parse_workload_length
from cluster.workloads.distributions import ConstantLength, Length, LogNormalLength, UniformLength
from protocol.errors import StartupError

SECONDS = 600.0


def plan_scenario(options: PlanOptions, plan: DeploymentPlan) -> dict[str, Any]:
    """Return the scenario. Cached tokens become a prefix that all prompts share, of the mean cached
    length."""
    pools = plan.sized.pools
    goals = plan.wanted.goals
    return {
        "name": "plan",
        "machines": {
            **{role: _machine(pool) for role, pool in pools.items()},
            "pace": max(1.0, plan.sized.pace),
        },
        "pools": {role: pool.workers for role, pool in pools.items()},
        "objectives": {"ttft_ms": goals.ttft_s * 1e3, "tpot_ms": goals.tpot_s * 1e3},
        "traffic": _trace(options) if options.trace is not None else _mix(options, plan),
        "autoscaler": {"mode": "off"},
        **({} if options.trace is not None else {"seconds": SECONDS}),
    }


def _machine(pool: PoolPlan) -> dict[str, Any]:
    machine = pool.machine
    return {
        "step": [float(c) for c in machine.step],
        "chunk": machine.chunk,
        "max_batch": machine.max_batch,
        "kv_tokens": machine.kv_tokens,
        "kv_bytes": machine.kv_bytes,
        "link_gb_per_s": machine.link_bytes_s / 1e9,
    }


def _trace(options: PlanOptions) -> dict[str, Any]:
    assert options.trace is not None
    if options.rate is not None:
        raise StartupError("--scenario: a trace has its own rate; use --scale instead of --rate")
    return {"trace": str(options.trace.resolve()), "speed": options.scale}


def _mix(options: PlanOptions, plan: DeploymentPlan) -> dict[str, Any]:
    assert options.prompt is not None and options.output is not None
    load = plan.wanted.workload
    mix: dict[str, Any] = {
        "rate": load.mix.rate,
        "prompt": _length(parse_workload_length(options.prompt, "--prompt")),
        "output": _length(parse_workload_length(options.output, "--output")),
    }
    if cached := round(load.prompt * load.shared):
        mix["prefix"] = cached
    return {"mixes": [mix]}


def _length(length: Length) -> str | int:
    match length:
        case ConstantLength(tokens):
            return tokens
        case UniformLength(low, high):
            return f"uniform:{low}-{high}"
        case LogNormalLength(mean, sigma, most):
            return f"lognormal:{mean:g},{sigma:.6g},{most}"


def write_scenario(path: Path, options: PlanOptions, plan: DeploymentPlan) -> None:
    """Write the scenario as YAML. Raises StartupError."""
    text = yaml.safe_dump(plan_scenario(options, plan), sort_keys=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
