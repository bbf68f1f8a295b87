"""A complete plan in one value, and its forms for programs: JSON, and a scenario with the same
machines, pools and load for `baton simulate`."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from cluster.planner import break_even
from cluster.planner.bottleneck import PoolBottleneck, find_bottleneck
from cluster.planner.break_even import SpeculationPayoff, SplitPayoff, WirePayoff
from cluster.planner.pools import PlanRequest, PoolPlan, SizedPools, size_pools
from cluster.planner.request import PlanOptions
from cluster.planner.workload import parse_workload_length
from cluster.workloads.distributions import LogNormalLength
from protocol.errors import UsageError
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


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for ``wanted``; `baton plan --json` has its fields, and more."""

    wanted: PlanRequest
    sized: SizedPools
    walls: dict[Role, PoolBottleneck]
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
        drafts=break_even.speculation_payoffs(request, sized),
        wire=break_even.wire_payoff(request, sized),
        split=break_even.split_payoff(request, sized),
        cost=plan_cost(request, sized),
    )


def plan_as_json(plan: DeploymentPlan) -> dict[str, Any]:
    """Return all figures for programs, without the samples of the workload."""
    load, token_bytes = plan.wanted.workload, plan.wanted.shape.kv_bytes
    found: dict[str, Any] = msgspec.to_builtins(plan)
    found["wanted"]["workload"] = {
        "told": load.told,
        "rate": load.mix.rate,
        "prompt_tokens": load.prompt,
        "shared": load.shared,
        "output_tokens": load.output,
        "kept_tokens": load.kept_tokens,
        "kept_bytes": load.kept_tokens * token_bytes,
    }
    found["kv"] = {
        "precision": plan.wanted.shape.kv.precision,
        "token_bytes": token_bytes,
        "exact_bytes": plan.wire.raw_bytes,
        "fp8_bytes": plan.wire.fp8_bytes,
        "pool_tokens": {role: pool.machine.kv_tokens for role, pool in plan.sized.pools.items()},
        "context": load.context,
        "sequences": plan.sized.ceilings.kv,
    }
    found["wanted"]["shape"].pop("cost")
    found["workers"] = {role: plan.sized.pools[role].workers for role in ROLES}
    found["slo_infeasible"] = list(plan.sized.infeasible)
    found["split"]["pays_at_tpot_s"] = plan.split.pays
    return found


SCENARIO_SECONDS = 600.0


def plan_scenario(options: PlanOptions, plan: DeploymentPlan) -> str:
    """Return the scenario as YAML. Cached tokens become a prefix that all prompts share, of the
    mean cached length."""
    pools = plan.sized.pools
    goals = plan.wanted.goals
    scenario = {
        "name": "plan",
        "machines": {role: _machine(pool) for role, pool in pools.items()},
        "pools": {role: pool.workers for role, pool in pools.items()},
        "objectives": {"ttft_ms": goals.ttft_s * 1e3, "tpot_ms": goals.tpot_s * 1e3},
        "traffic": _trace(options) if options.trace is not None else _mix(options, plan),
        "autoscaler": {"mode": "off"},
        **({} if options.trace is not None else {"seconds": SCENARIO_SECONDS}),
    }
    return yaml.safe_dump(scenario, sort_keys=False)


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
        "prompt": _length(options.prompt, "--prompt"),
        "output": _length(options.output, "--output"),
    }
    if cached := round(load.prompt * load.shared):
        mix["prefix"] = cached
    return {"mixes": [mix]}


def _length(text: str, option: str) -> str:
    """Return a length in a form that scenarios have, too."""
    found = parse_workload_length(text, option)
    if "/" not in text or not isinstance(found, LogNormalLength):
        return text
    return f"lognormal:{found.mean:g},{found.sigma:.6g},{found.most}"
