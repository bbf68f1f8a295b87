"""A complete plan in one value, and its forms for programs: JSON, and a scenario with the same
machines, pools and load for `baton simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from cluster.planner import break_even
from cluster.planner.bottleneck import PoolBottleneck, find_bottleneck
from cluster.planner.break_even import SpeculationPayoff, SplitPayoff, WirePayoff
from cluster.planner.pools import PlanRequest, PoolPlan, SizedPools, size_pools
from cluster.planner.request import PlanOptions
from cluster.planner.workload import parse_workload_length
from cluster.workloads.distributions import ConstantLength, Length, LogNormalLength, UniformLength
from engine.kv_cache.kv_format import Codec
from protocol.errors import StartupError, UsageError
from protocol.roles import ROLES, Role

_MILLIONS_AN_HOUR = 3600.0 / 1e6


class PlanCost(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in USD: of an hour of all GPUs, and of a million tokens. Prompt tokens pay for the
    prefill pool, cached ones as much as others; output tokens pay for the decode pool; ``blended``
    covers both."""

    hour: float
    prompt_tokens: float
    output_tokens: float
    blended: float


def plan_cost(request: PlanRequest, sized: SizedPools) -> PlanCost | None:
    """Return the cost; None where a GPU's price is unknown."""
    hour = sized.usd_per_hour
    if hour is None:
        return None
    load = request.workload
    prompts = load.mix.rate * load.prompt * _MILLIONS_AN_HOUR
    outputs = load.mix.rate * load.output * _MILLIONS_AN_HOUR
    return PlanCost(
        hour=hour,
        prompt_tokens=(sized.pools["prefill"].usd_per_hour or 0.0) / prompts,
        output_tokens=(sized.pools["decode"].usd_per_hour or 0.0) / outputs,
        blended=hour / (prompts + outputs),
    )


class KvPlan(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one token in bytes: in the pool, uncompressed (exact), and in fp8. ``pool_tokens``:
    size of a worker's pool. ``context``: mean tokens of a sequence while it decodes. ``sequences``:
    how many of those a decode worker's pool holds."""

    precision: str
    token_bytes: float
    exact_bytes: float
    fp8_bytes: float
    pool_tokens: dict[Role, int]
    context: float
    sequences: int


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for ``wanted``; its fields are those of `baton plan --json`."""

    wanted: PlanRequest
    sized: SizedPools
    walls: dict[Role, PoolBottleneck]
    kv: KvPlan
    drafts: list[SpeculationPayoff]
    wire: WirePayoff
    split: SplitPayoff
    cost: PlanCost | None


def make_plan(request: PlanRequest) -> DeploymentPlan:
    """Compute a plan. Raises StartupError for a model that does not fit a GPU."""
    sized = size_pools(request)
    return DeploymentPlan(
        wanted=request,
        sized=sized,
        walls={role: find_bottleneck(request, sized, sized.pools[role]) for role in ROLES},
        kv=_kv(request, sized),
        drafts=break_even.speculation_payoffs(request, sized),
        wire=break_even.wire_payoff(request, sized),
        split=break_even.split_payoff(request, sized),
        cost=plan_cost(request, sized),
    )


def _kv(request: PlanRequest, sized: SizedPools) -> KvPlan:
    shape = request.shape
    return KvPlan(
        precision=shape.kv.precision,
        token_bytes=shape.kv_bytes,
        exact_bytes=shape.wire_bytes(Codec.RAW),
        fp8_bytes=shape.wire_bytes(Codec.FP8),
        pool_tokens={role: sized.pools[role].machine.kv_tokens for role in ROLES},
        context=request.workload.context,
        sequences=sized.ceilings.kv,
    )


def plan_as_json(plan: DeploymentPlan) -> dict[str, Any]:
    """Return all figures for programs, without the samples of the workload."""
    load = plan.wanted.workload
    found: dict[str, Any] = msgspec.to_builtins(plan)
    found["wanted"]["workload"] = {
        "told": load.told,
        "rate": load.mix.rate,
        "prompt_tokens": load.prompt,
        "shared": load.shared,
        "output_tokens": load.output,
        "kept_tokens": load.kept_tokens,
        "kept_bytes": load.kept_tokens * plan.kv.token_bytes,
    }
    found["wanted"]["shape"].pop("cost")
    found["workers"] = {role: plan.sized.pools[role].workers for role in ROLES}
    found["slo_infeasible"] = list(plan.sized.infeasible)
    found["split"]["pays_at_tpot_s"] = plan.split.pays
    return found


SCENARIO_SECONDS = 600.0


def plan_scenario(options: PlanOptions, plan: DeploymentPlan) -> dict[str, Any]:
    """Return the scenario. Cached tokens become a prefix that all prompts share, of the mean cached
    length."""
    pools = plan.sized.pools
    goals = plan.wanted.goals
    return {
        "name": "plan",
        "machines": {role: _machine(pool) for role, pool in pools.items()},
        "pools": {role: pool.workers for role, pool in pools.items()},
        "objectives": {"ttft_ms": goals.ttft_s * 1e3, "tpot_ms": goals.tpot_s * 1e3},
        "traffic": _trace(options) if options.trace is not None else _mix(options, plan),
        "autoscaler": {"mode": "off"},
        **({} if options.trace is not None else {"seconds": SCENARIO_SECONDS}),
    }


def _machine(pool: PoolPlan) -> dict[str, Any]:
    machine = pool.machine
    return {
        "tp": pool.gpu.count,
        "step": [float(c) for c in machine.step],
        "chunk": machine.chunk,
        "max_batch": machine.max_batch,
        "kv_tokens": machine.kv_tokens,
        "kv_bytes": machine.kv_bytes,
        "link_gb_per_s": machine.link_bytes_s / 1e9,
        "speculation": msgspec.to_builtins(machine.speculation),
    }


def _trace(options: PlanOptions) -> dict[str, Any]:
    assert options.trace is not None
    if options.rate is not None:
        raise UsageError("--scenario: a trace has its own rate; use --scale instead of --rate")
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
