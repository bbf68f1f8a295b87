"""A plan as sentences and tables, the same in a terminal and on a page; prints it in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from cluster.planner.bottleneck import PoolBottleneck, batch_advice
from cluster.planner.break_even import LARGEST_BATCH
from cluster.planner.plan import DeploymentPlan
from cluster.planner.pools import PoolPlan
from protocol.roles import ROLES
from router.walls.techniques import Technique


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unbounded"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    """Format a number of bytes."""
    if count < 2**20:
        return f"{count / 2**10:.4g} KiB"
    exponent, unit = next((e, u) for e, u in _UNITS if count >= 1000 * 2 ** (e - 10) or e == 20)
    value = count / 2**exponent
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"))


def speed(value: float) -> str:
    return f"{value:.3g} GB/s"


def usd(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


class PlanTable(NamedTuple):
    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def describe_request(plan: DeploymentPlan) -> list[str]:
    """Return sentences on the model, the workload and the objectives."""
    shape, goals = plan.wanted.shape, plan.wanted.goals
    sparse = shape.active < 0.8 * shape.parameters
    active = f", {shape.active / 1e9:.3g} B of them active for a token" if sparse else ""
    return [
        f"{shape.name}: {shape.parameters / 1e9:.3g} B parameters{active},"
        f" {shape.weight_bytes / 2**30:.1f} GiB of weights"
        f" ({'fp8' if shape.weight_element_bytes == 1 else 'bf16'}); KV {shape.kv.precision}",
        plan.wanted.workload.told,
        f"Objectives: first token within {duration(goals.ttft_s)} for 90% of requests, then"
        f" {duration(goals.tpot_s)} a token",
    ]


def slo_warnings(plan: DeploymentPlan) -> list[str]:
    """Return warnings for objectives that no number of workers meets (``slo_infeasible``)."""
    sized, goals = plan.sized, plan.wanted.goals
    found = []
    if "ttft" in sized.infeasible:
        found.append(
            f"No number of workers meets a TTFT of {duration(goals.ttft_s)}: on an idle worker 90%"
            f" of these prompts take up to {duration(sized.least_ttft_s)}."
            " Workers are counted so that such a prompt waits in the queue no longer than the time"
            " by which it misses the objective anyway."
        )
    if "tpot" in sized.infeasible:
        found.append(
            f"No batch meets a TPOT of {duration(goals.tpot_s)}: a sequence alone takes"
            f" {duration(sized.least_tpot_s)} a token. The sizes are for a longer TPOT."
        )
    return found


def plan_notes(plan: DeploymentPlan) -> list[str]:
    """Return which rates GPUs lack, what a larger batch would save, and what is assumed about
    caches."""
    gpus = {gpu.name: gpu for gpu in plan.wanted.gpus.values()}.values()
    lacking = [note for g in gpus for note in g.rate_notes(plan.wanted.shape.weight_element_bytes)]
    return [*lacking, *batch_advice(plan.wanted, plan.sized), *_cache_notes(plan)]


def _cache_notes(plan: DeploymentPlan) -> list[str]:
    """Return what the figures assume about caches and a cluster may not have."""
    kept, pool = plan.wanted.workload.kept_tokens, plan.sized.pools["prefill"]
    if not kept:
        return []
    held, token_bytes = pool.workers * pool.machine.kv_tokens, plan.wanted.shape.kv_bytes
    return [
        "Hits are counted for caches of unlimited size: all distinct blocks of the trace take"
        f" {size(kept * token_bytes)} of KV ({kept:,} tokens); the pools of the"
        f" prefill workers hold {size(held * token_bytes)} ({held:,} tokens) in total,"
        " and each worker has its own. `baton simulate` replays the trace with caches of this size."
    ]


def plan_tables(plan: DeploymentPlan) -> list[PlanTable]:
    return [
        _pools(plan),
        _walls(plan),
        _latency(plan),
        _batch(plan),
        _kv(plan),
        _drafts(plan),
        _wire(plan),
        _split(plan),
        *_cost(plan),
    ]


def _pools(plan: DeploymentPlan) -> PlanTable:
    heads = ("pool", "GPU", "workers", "used", "steps run", "load", "each worker")
    rows = [_pool(plan.sized.pools[role]) for role in ROLES]
    return PlanTable("Pools", heads, rows)


def _pool(pool: PoolPlan) -> tuple[str, ...]:
    need = pool.need
    prefill = pool.role == "prefill"
    load = f"{need.load:.2f} workers busy" if prefill else f"{need.load:,.0f} sequences"
    each = (
        f"a prompt in {duration(need.each)}" if prefill else f"{need.each:,.0f} sequences at most"
    )
    shares = (f"{pool.busy:.0%}", f"{pool.stepping:.0%}")
    return (pool.role, pool.gpu.name, str(pool.workers), *shares, load, each)


def _walls(plan: DeploymentPlan) -> PlanTable:
    rows = [
        (role, plan.walls[role].wall, plan.walls[role].why, _relax(plan.walls[role]))
        for role in ROLES
    ]
    return PlanTable(
        "Which wall binds", ("pool", "wall", "because of", "what would relax it"), rows
    )


def _relax(bound: PoolBottleneck) -> str:
    texts = [_technique_text(bound, each) for each in bound.relax[:2]]
    return "; ".join(texts) or "no known technique"


def _technique_text(bound: PoolBottleneck, technique: Technique) -> str:
    if bound.wall == "cost":
        text = f"{technique.name}: {1 / technique.gain:.0%} of this one's speed suffices"
    else:
        text = f"{technique.name}: up to {technique.gain:.1f} times the throughput"
    return f"{text} (but {technique.trap})"


def _latency(plan: DeploymentPlan) -> PlanTable:
    sized, goals = plan.sized, plan.wanted.goals
    heads = ("", "objective", "predicted mean", "on an idle worker")
    ttft, tpot = f"{duration(sized.least_ttft_s)} for 90%", f"{duration(sized.least_tpot_s)} alone"
    rows = [
        ("TTFT", duration(goals.ttft_s), duration(sized.predicted.ttft_s), ttft),
        ("TPOT", duration(goals.tpot_s), duration(sized.predicted.tpot_s), tpot),
    ]
    return PlanTable("Latency, with these workers", heads, rows)


def _batch(plan: DeploymentPlan) -> PlanTable:
    c = plan.sized.ceilings
    bounds = (("tpot", "TPOT objective", c.tpot), ("kv", "KV pool", c.kv))
    rows = [
        (name, f"{most:,}", "binds" if key == c.binds else "")
        for key, name, most in (*bounds, ("max_batch", "max_batch", c.max_batch))
    ]
    return PlanTable("Largest batch of a decode worker", ("by", "sequences", ""), rows)


def _kv(plan: DeploymentPlan) -> PlanTable:
    pools = plan.sized.pools
    rows = [
        ("one token, exact", size(plan.wire.raw_bytes)),
        ("one token, fp8", size(plan.wire.fp8_bytes)),
        *((f"pool of a {r} worker", f"{pools[r].machine.kv_tokens:,} tokens") for r in ROLES),
        ("mean tokens of a decoding sequence", f"{plan.wanted.workload.context:,.0f} tokens"),
        ("such sequences in a decode worker's pool", f"{plan.sized.ceilings.kv:,}"),
    ]
    return PlanTable("KV", ("", ""), rows)


def _drafts(plan: DeploymentPlan) -> PlanTable:
    heads = ("acceptance", f"speed-up at batch {plan.sized.ceilings.size}", "pays up to batch")
    rows = [
        (
            f"{d.acceptance:g}",
            f"{d.speedup:.2f}" if d.speedup > 1 else "-",
            f"{d.pays_up_to}{'+' * (d.pays_up_to >= LARGEST_BATCH)}" if d.pays_up_to else "-",
        )
        for d in plan.drafts
    ]
    drafting = plan.wanted.drafting
    by = drafting.model.name if drafting and drafting.model else None
    cost = f"{by} drafts" if by else "drafts cost nothing"
    return PlanTable(f"Speculation (if {cost})", heads, rows)


def _wire(plan: DeploymentPlan) -> PlanTable:
    w = plan.wire
    link = plan.sized.pools["prefill"].machine.link_bytes_s / 1e9
    heads = ("", "as computed", "fp8")
    rows = [
        ("KV of a token", size(w.raw_bytes), size(w.fp8_bytes)),
        ("link that is as fast as prefill", speed(w.hidden_raw), speed(w.hidden_fp8)),
        (f"time of a mean prompt at {speed(link)}", f"{w.ms_raw:,.1f} ms", f"{w.ms_fp8:,.1f} ms"),
        ("fp8 pays if the link is below", "", speed(w.fp8_below)),
        ("what Baton sends", *(("x" if w.codec == c else "") for c in ("raw", "fp8"))),
    ]
    return PlanTable("KV on the wire", heads, rows)


def _split(plan: DeploymentPlan) -> PlanTable:
    ways = (
        ("one pool, mixed steps", plan.split.mixed),
        ("one pool, separate steps", plan.split.apart),
    )
    rows = [("two pools", str(plan.split.split), usd(plan.sized.usd_per_hour))]
    for name, found in ways:
        if found is None:
            rows.append((name, "no number", ""))
        else:
            label = f"{name}, {found.gpu.name}, at least"
            rows.append((label, str(found.workers), usd(found.usd_per_hour)))
    rows.append(("two pools need no more workers than mixed steps at a TPOT of", _ranges(plan), ""))
    heads = ("", "workers", "USD per hour")
    return PlanTable("Two pools or one pool, at the same objectives", heads, rows)


def _ranges(plan: DeploymentPlan) -> str:
    found = [
        duration(low) if low == high else f"{duration(low)} to {duration(high)}"
        for low, high in plan.split.pays
    ]
    return ", ".join(found[:3]) or "none"


def _cost(plan: DeploymentPlan) -> Iterator[PlanTable]:
    if (c := plan.cost) is not None:
        rows = [
            ("all workers, per hour", usd(c.hour)),
            ("per million prompt tokens", usd(c.prompt_tokens)),
            ("per million output tokens", usd(c.output_tokens)),
            ("per million tokens, blended", usd(c.blended)),
        ]
        yield PlanTable("Cost", ("", "USD"), rows)


def legend(plan: DeploymentPlan) -> list[str]:
    """Return the assumptions behind the figures."""
    e = plan.wanted.efficiency
    shares = sorted({e.compute or gpu.compute_share for gpu in plan.wanted.gpus.values()})
    prices = {g.name: g.price for g in plan.wanted.gpus.values() if g.usd_per_hour is not None}
    texts = "; ".join(f"{name}: {price}" for name, price in prices.items())
    return [
        f"Assumed, not measured: products reach {' and '.join(f'{c:.0%}' for c in shares)} of a"
        f" GPU's dense FLOPs, steps {e.bandwidth:.0%} of its bandwidth, and cost"
        f" {e.overhead_s * 1e3:g} ms of overhead (--compute-efficiency, --bandwidth-efficiency,"
        " --overhead-ms), which fits published throughputs of TensorRT-LLM. What workers measure is"
        " better: `baton simulate` takes it (machines.POOL.step).",
        "Used: share of what the workers can serve within the objectives. Steps run: share of the"
        " time, as `baton simulate` reports it: a decode worker runs steps whenever it has a"
        " sequence, so this is near 100% long before the worker is full.",
        "Workers: the policy of the autoscaler, for a steady load: at most 10% of the requests"
        " wait longer than the TTFT objective allows, and decode workers have room for 98% of the"
        " random fluctuations.",
        "One pool: an estimate in their favor: prompts go where a worker is free, in chunks that"
        " keep"
        " steps within the TPOT objective; mixed: in the steps of decoding sequences, while weights"
        " are read (as with `--prefill 0`).",
        *(
            [f"Prices: {texts}. Prices change: give your own, as in --gpu H100@2.50."]
            if texts
            else []
        ),
    ]


def print_plan(console: Console, plan: DeploymentPlan) -> None:
    for line in describe_request(plan):
        console.print(line, style="dim")
    for warning in slo_warnings(plan):
        console.print(f"\n{warning}", style="bold yellow")
    for note in plan_notes(plan):
        console.print(f"\n{note}", style="yellow")
    for table in plan_tables(plan):
        console.print()
        console.print(rich_table(table))
    console.print()
    for line in legend(plan):
        console.print(line, style="dim")


def rich_table(table: PlanTable) -> RichTable:
    found = RichTable(title=table.title, title_justify="left", show_header=any(table.heads))
    for i, head in enumerate(table.heads):
        figures = i > 0 and all(_is_number(row[i]) for row in table.rows)
        found.add_column(head, justify="right" if figures else "left")
    for row in table.rows:
        found.add_row(*row)
    return found


def _is_number(text: str) -> bool:
    """Return whether the cell is a number or stands for one."""
    return not text or text in ("-", "x", "none") or (text[0].isdigit() and len(text) < 16)
