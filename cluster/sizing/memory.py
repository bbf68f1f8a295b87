"""The state that the policy carries from one decision to the next. Pure.

Demand: its history, by which workers count as spare, and by which forecasts are checked. Growth of
the load while a worker starts. Corrections are those of ``corrections.py``.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from cluster.sizing.burstiness import LONGEST_S, burstiness
from cluster.sizing.decision import LoadForecast
from cluster.sizing.growth import GROWTH_PERIODS
from cluster.sizing.queueing import CHANCE_DEVIATIONS, service_time
from cluster.sizing.snapshot import (
    DemandSample,
    RequestMix,
    ScalingTuning,
    SizingMemory,
    WorkerCounts,
    WorkerLevel,
)
from protocol.roles import Role

FORECAST_S = 60.0
"""Seconds that a forecast is for."""
LONGEST_GAP = 1.5
"""Windows of the mix from one sample of the demand to the next. Turns may be a window apart, and
never are exactly so."""
MAX_EXTRA_STARTS = 5
"""``WorkerLevel.extra_s`` at most, in times of a start."""
START_COST = 2.0
"""A start that is needed costs twice its time: that of the worker, and that of the requests which
the missing worker delays. Where ``down_after_s`` is set, it takes the place of that time."""
MAX_LEVELS = 4096
NO_WORKERS = WorkerCounts(prefill=0, decode=0)


def record_demand(
    memory: SizingMemory,
    at_s: float,
    mix: RequestMix,
    demand: WorkerCounts,
    present: WorkerCounts,
    tuning: ScalingTuning,
    starting: WorkerCounts = NO_WORKERS,
    lasting: WorkerCounts = NO_WORKERS,
) -> SizingMemory:
    """Add the current demand and, once in ``start_s``, the growth of the load. ``present``: the
    workers of each role, with those that are ``starting``. ``lasting``: those that will be needed
    count as used.

    While workers start, what was needed in the last ``start_s`` counts as used. Older demand does
    not, because a start that nothing has room for is pending until it is no longer asked for.

    Samples older than needed are dropped, except for the last of them. Where the latest is older
    than LONGEST_GAP windows of ``mix``, too little is known of the time between: all are dropped.
    """
    if memory.past and at_s - memory.past[-1].at_s > LONGEST_GAP * mix.window_s:
        memory = replace(memory, past=(), prefill_levels=(), decode_levels=(), growth_s=None)
    uncached = service_time([s.uncached for s in mix.samples], [s.weight for s in mix.samples])
    load = mix.rate * uncached.mean_s
    past = (*memory.past, DemandSample(at_s, demand.prefill, demand.decode, mix.rate, load))
    keep_s = max(tuning.start_s, FORECAST_S)
    old = [p for p in past if p.at_s < at_s - keep_s]

    def levels(role: Role) -> tuple[WorkerLevel, ...]:
        seen = memory.prefill_levels if role == "prefill" else memory.decode_levels
        asked = min(asked_for.of(role), present.of(role)) if starting.of(role) else 0
        needed = max(demand.of(role), lasting.of(role), asked)
        return _used_levels(seen, at_s, needed, present.of(role), tuning)

    memory = replace(memory, past=(*old[-1:], *(p for p in past if p.at_s >= at_s - keep_s)))
    asked_for = largest_demand(memory, at_s, tuning.start_s)
    memory = replace(memory, prefill_levels=levels("prefill"), decode_levels=levels("decode"))
    requests, new = mix.rate * mix.window_s, min(1.0, tuning.start_s / max(mix.window_s, 1e-9))
    together = 1.0 + burstiness(mix.arrivals, min(LONGEST_S, tuning.start_s))
    chance = 2.0 * (together + uncached.spread) * new / max(requests, 1.0)
    return _record_growth(memory, at_s, load, tuning.start_s, chance)


def _used_levels(
    levels: tuple[WorkerLevel, ...], at_s: float, needed: int, present: int, tuning: ScalingTuning
) -> tuple[WorkerLevel, ...]:
    """Return the levels after the current demand. A worker that starts does not idle yet.

    A worker that is stopped after ``idle_limit_s`` and started again costs that time and a start.
    If the demand returns earlier than that, idling on would have been cheaper by the difference,
    by which the next limit is longer. If it returns later, the next limit is shorter.
    """
    start_s = _start_s(tuning)
    most_s = MAX_EXTRA_STARTS * start_s
    # A level that has idled for so long would have no extra_s when it is used again.
    recent = sum(
        at_s - x.used_s <= most_s + idle_limit_s(x, tuning) + START_COST * start_s for x in levels
    )
    used = min(needed, MAX_LEVELS)
    count = min(max(used, recent, present), MAX_LEVELS)
    known = (*levels, *(WorkerLevel(at_s),) * (count - len(levels)))[:count]

    def use(level: WorkerLevel) -> WorkerLevel:
        idle_s, limit_s = at_s - level.used_s, idle_limit_s(level, tuning)
        if idle_s <= limit_s:
            return WorkerLevel(at_s, level.extra_s)
        extra_s = level.extra_s + limit_s + START_COST * start_s - idle_s
        return WorkerLevel(at_s, min(most_s, max(0.0, extra_s)))

    return (*map(use, known[:used]), *known[used:])


def idle_limit_s(level: WorkerLevel, tuning: ScalingTuning) -> float:
    """Return for how many seconds a worker idles before it is stopped: for as long as a start
    takes, and ``extra_s``.

    This is the ski rental problem. Stopping a server once it has idled for as long as its start
    costs takes at most twice what the best choice with knowledge of the future would (Lu, Chen and
    Andrew, "Simple and Effective Dynamic Provisioning for Power-Proportional Data Centers",
    2013)."""
    return _start_s(tuning) + level.extra_s


def _start_s(tuning: ScalingTuning) -> float:
    """Return the seconds that a start counts for."""
    return tuning.start_s if tuning.down_after_s is None else tuning.down_after_s


def needed_lately(memory: SizingMemory, at_s: float, tuning: ScalingTuning) -> WorkerCounts:
    """Return the workers of each role that have not idled for as long as ``idle_limit_s``."""

    def count(levels: tuple[WorkerLevel, ...]) -> int:
        kept = [n for n, x in enumerate(levels, 1) if at_s - x.used_s < idle_limit_s(x, tuning)]
        return max(kept, default=0)

    return WorkerCounts(prefill=count(memory.prefill_levels), decode=count(memory.decode_levels))


def _record_growth(
    memory: SizingMemory, at_s: float, load: float, start_s: float, chance: float
) -> SizingMemory:
    """Record what ``load`` has grown by in ``start_s``, once in that time. ``chance``: variance of
    the growth that would be seen of a constant load, which the queue model has room for already.
    Independent deviations add up as squares, so that it is taken off as a square."""
    if memory.growth_s is None:
        return replace(memory, growth_s=at_s)
    then = sample_before(memory, at_s, start_s)
    if at_s - memory.growth_s < start_s or then is None:
        return memory
    if then.load <= 0:
        return replace(memory, growth_s=at_s)
    seen = max(0.0, load / then.load - 1.0)
    grown = math.sqrt(max(0.0, seen**2 - CHANCE_DEVIATIONS**2 * chance))
    return replace(memory, growth=(*memory.growth, grown)[-GROWTH_PERIODS:], growth_s=at_s)


def sample_before(memory: SizingMemory, at_s: float, seconds: float) -> DemandSample | None:
    """Return the latest sample that is at least ``seconds`` old."""
    return next((p for p in reversed(memory.past) if p.at_s <= at_s - seconds), None)


def forecast_error(memory: SizingMemory, at_s: float) -> LoadForecast | None:
    """Return the relative errors of the forecast of FORECAST_S ago, which was that the load stays
    as it was: with a trend of the last minute, the error is smaller on some traces and larger on
    others."""
    then, now = sample_before(memory, at_s, FORECAST_S), memory.past[-1]
    if then is None:
        return None

    def error(came: float, forecast: float) -> float:
        return came / forecast - 1.0 if forecast > 0 else float(came > 0)

    return LoadForecast(
        rate=error(now.rate, then.rate),
        prefill=error(now.prefill, then.prefill),
        decode=error(now.decode, then.decode),
    )


def largest_demand(memory: SizingMemory, at_s: float, within_s: float) -> WorkerCounts:
    """Return the largest demand of the last ``within_s`` for each role."""
    recent = [p for p in memory.past if p.at_s >= at_s - within_s]
    return WorkerCounts(
        prefill=max((p.prefill for p in recent), default=0),
        decode=max((p.decode for p in recent), default=0),
    )


def lacking_s(memory: SizingMemory, role: Role, workers: int) -> float:
    """Return the time for which at least so many workers will have been needed at the next
    decision; inf where this is the first one."""
    if len(memory.past) < 2:
        return math.inf
    now, before = memory.past[-1], memory.past[-2]
    since_s = now.at_s
    for sample in reversed(memory.past):
        if (sample.prefill if role == "prefill" else sample.decode) < workers:
            break
        since_s = sample.at_s
    return 2 * now.at_s - before.at_s - since_s


def has_history(memory: SizingMemory, at_s: float, within_s: float) -> bool:
    """Return whether the samples reach back ``within_s``."""
    return bool(memory.past) and memory.past[0].at_s <= at_s - within_s
