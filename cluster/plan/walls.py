"""Which wall a pool runs into first, and what would relax it. Pure.

compute, bandwidth, capacity and network are those that a live cluster names (router/walls), here of
a worker with as much to do as its objectives allow. ``cost``: the least that can be had is more
than the load needs, so that its price is what stands in the way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cluster.plan.pools import Pool, Sized, Wanted
from cluster.plan.shape import Work
from engine.kv_format import Codec
from protocol.walls import Wall, Walls
from router.walls import techniques
from router.walls.techniques import Technique

AnyWall: TypeAlias = Literal[Wall, "cost"]

IDLE = 0.5
"""Below this share of one worker the pool's price binds."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """``why``: for a reader; ``relax``: the best first. ``compute`` and ``bandwidth``: shares of
    the rates that steps reach, of a step with as much in it as is allowed."""

    wall: AnyWall
    why: str
    relax: tuple[Technique, ...]
    compute: float
    bandwidth: float


def bound(wanted: Wanted, of: Sized, pool: Pool) -> Bound:
    figures = _figures(wanted, of, pool)
    wall, why = _prefill(pool, figures) if pool.role == "prefill" else _decode(of, pool, figures)
    if pool.need.link_floor >= pool.workers > 1:
        wall, why = "network", "the links alone want so many workers"
    elif pool.workers == 1 and pool.busy < IDLE:
        wall, why = "cost", f"one worker, {pool.busy:.0%} busy, is the least there is"
    full = pool.role == "decode" and of.ceilings.binds == "max_batch"
    asked = techniques.Pool(pool.role, pool.workers, figures, int(full), of.ceilings.max_batch)
    relax = _cheaper(pool) if wall == "cost" else techniques.techniques(asked, wall)
    if pool.role == "prefill" and wall == "bandwidth":
        relax = [_larger_chunk(figures), *relax]
    return Bound(
        wall=wall,
        why=why,
        relax=tuple(relax),
        compute=figures.compute,
        bandwidth=figures.bandwidth,
    )


def _prefill(pool: Pool, figures: Walls) -> tuple[AnyWall, str]:
    if figures.compute >= figures.bandwidth:
        return "compute", f"FLOPs of a chunk of {pool.machine.chunk} tokens"
    return "bandwidth", f"a chunk of {pool.machine.chunk} tokens is read for longer than computed"


def _decode(of: Sized, pool: Pool, figures: Walls) -> tuple[AnyWall, str]:
    side: AnyWall = "compute" if figures.compute > figures.bandwidth else "bandwidth"
    size = of.ceilings.size
    if of.ceilings.binds == "kv":
        return "capacity", f"the KV pool holds {size} sequences"
    if of.ceilings.binds == "max_batch":
        return side, f"max_batch allows {size} sequences; KV and TPOT would allow more"
    return side, f"a step of {size} sequences takes all that the TPOT objective allows"


def _figures(wanted: Wanted, of: Sized, pool: Pool) -> Walls:
    """As a worker of the pool would report them with as much to do as is allowed."""
    work = _work(wanted, of, pool)
    at = wanted.rates(pool.role)
    seconds = at.seconds(work)
    shape, kv = wanted.shape, wanted.shape.kv
    fp8 = shape.wire_bytes(Codec.FP8)
    return Walls(
        seconds=1.0,
        busy=1.0,
        compute=min(1.0, work.flops / at.flops / seconds),
        bandwidth=min(1.0, work.bytes / at.bytes_s / seconds),
        capacity=1.0 if of.ceilings.binds == "kv" else 0.0,
        network=0.0,
        starved=0.0,
        kv_wait=0.0,
        batch=float(of.ceilings.size) if pool.role == "decode" else 0.0,
        kv_share=work.kv_bytes / work.bytes,
        element_bytes=shape.element_bytes,
        kv_shrink=shape.wire_bytes(Codec.RAW) / fp8 if kv.storage == "wide" else 1.0,
        wire_shrink=shape.wire_bytes(shape.codec) / fp8,
        gpu=True,
        drafts=wanted.drafting is not None,
    )


def _work(wanted: Wanted, of: Sized, pool: Pool) -> Work:
    load = wanted.workload
    if pool.role == "decode":
        return wanted.shape.decode(of.ceilings.size, load.context)
    computed = load.prompt * load.shared
    middle = (computed + load.prompt) / 2
    tokens = min(pool.machine.chunk, load.prompt - computed)
    return wanted.shape.prompt(max(0.0, middle - tokens / 2), tokens)


def _larger_chunk(figures: Walls) -> Technique:
    """Twice as large: weights are read once for both halves."""
    gain = 2.0 / max(1.0, 2.0 * figures.compute)
    return Technique("a larger chunk", gain, "a prompt behind it waits longer")


def _cheaper(pool: Pool) -> list[Technique]:
    gain = 1.0 / max(pool.busy, 0.05)
    return [Technique("a cheaper GPU", gain, "less room for bursts; its objectives may be missed")]
