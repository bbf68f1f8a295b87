"""Searches for the smallest split of prefill and decode workers that attains a share."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from cluster.simulator.devices.cache import SimulatedCache
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.result import meets_objectives
from cluster.simulator.scenario import Scenario, ScenarioPoolsSection
from cluster.simulator.simulation import Simulation, scenario_machines
from cluster.simulator.traffic import scenario_requests

AMPLE = 4
"""Workers with which no prompt waits for long, in times of those that are needed."""
LOOK_EVERY = 200
"""Requests between two checks of whether the share can still be reached."""
LEAD_S = 60.0
"""Seconds of traffic before a window that are simulated but not counted. Earlier requests are
simulated if their answers can last into the window; the prompts of the others are cached."""

ProgressPrinter = Callable[[str], None]


class PoolSplit(NamedTuple):
    """Numbers of prefill and decode workers."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


def parse_splits(text: str) -> list[PoolSplit]:
    """Parse ``P+D,P+D``. Raises ArgumentTypeError."""
    found = [re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", part) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected P+D,P+D,... and not {text!r}")
    return [PoolSplit(int(each[1]), int(each[2])) for each in found if each]


class SplitTrial:
    """Simulates fixed splits on one scenario.

    ``attains`` tells whether a split meets both objectives for ``share`` of the requests.
    """

    def __init__(self, scenario: Scenario, share: float = 1.0) -> None:
        self.share = share
        self.scenario = scenario
        self.machines = scenario_machines(scenario)
        self._jobs = scenario_requests(scenario)

    @property
    def ends(self) -> float:
        return self._jobs[-1].at

    def between(self, begin: float, end: float) -> list[SimulatedRequest]:
        return [job for job in self._jobs if begin <= job.at < end]

    def _unfinished(self, at: float) -> list[SimulatedRequest]:
        """Return the requests from before ``at`` that can have an effect on later ones."""
        pace = self.scenario.goals.tpot_s
        return [
            job
            for job in self._jobs
            if job.at < at and (job.at >= at - LEAD_S or job.at + job.output * pace > at)
        ]

    def attains(self, split: PoolSplit, begin: float = 0.0, end: float = math.inf) -> bool:
        """Simulate a split; only requests that arrive from ``begin`` to ``end`` count."""
        return self.misses_at_most(split, begin, end, self.may_miss(begin, end))

    def misses_at_most(self, split: PoolSplit, begin: float, end: float, may_miss: int) -> bool:
        return self.misses(split, begin, end, may_miss) <= may_miss

    def may_miss(self, begin: float, end: float) -> int:
        return int((1 - self.share) * len(self.between(begin, end)) + 1e-9)

    def misses(
        self, split: PoolSplit, begin: float = 0.0, end: float = math.inf, enough: float = math.inf
    ) -> int:
        """Simulate a split; return how many requests from ``begin`` to ``end`` miss an objective,
        or a number above ``enough``."""
        unfinished = self._unfinished(begin)
        played = [*unfinished, *self.between(begin, end)]
        first = min((job.at for job in played), default=begin)
        jobs = [
            SimulatedRequest(j.number, j.at - first, j.prompt, j.output, j.blocks) for j in played
        ]
        counted = [job for job, of in zip(jobs, played, strict=True) if of.at >= begin]
        pools = ScenarioPoolsSection(prefill=split.prefill, decode=split.decode)
        scenario = self.scenario.model_copy(update={"pools": pools})
        world = Simulation(scenario)
        caches = [worker.cache for worker in world.fleet.workers if worker.role == "prefill"]
        computed = set(unfinished)  # in this simulation, and cached by it
        past = [job for job in self.between(0.0, begin) if job not in computed]
        cache_prompts(caches, self.machines["prefill"].kv_tokens, past)
        return _misses(world, jobs, set(counted), enough)


def cache_prompts(
    caches: Sequence[SimulatedCache], tokens: int, jobs: Sequence[SimulatedRequest]
) -> None:
    """Fill caches of ``tokens`` each with the latest prompts: a prompt comes to the cache that has
    most of it, or to each in turn."""
    room, latest = len(caches) * tokens, []
    for job in reversed([job for job in jobs if job.blocks]):
        room -= job.prompt
        if room < 0:
            break
        latest.append(job)
    for number, job in enumerate(reversed(latest)):
        best = max(caches, key=lambda cache: cache.cached_tokens(job.blocks))
        is_held = 2 * best.cached_tokens(job.blocks) > job.prompt
        (best if is_held else caches[number % len(caches)]).insert(job.blocks)


def _misses(
    world: Simulation, jobs: Sequence[SimulatedRequest], counted: set[SimulatedRequest],
    enough: float,
) -> int:  # fmt: skip
    """Count the requests of ``counted`` that miss an objective, and stop above ``enough``."""
    clock, ended, missed, seen = world.clock, world.lifecycle.ended, 0, 0
    goals = world.goals
    unanswered: list[SimulatedRequest] = []
    for number, job in enumerate(jobs):
        clock.run_before(job.at)
        world.lifecycle.arrive(job)
        if job in counted:
            unanswered.append(job)
        if number % LOOK_EVERY == 0 or job is jobs[-1]:
            missed += sum(not all(meets_objectives(j, goals)) for j in ended[seen:] if j in counted)
            seen = len(ended)
            unanswered = [j for j in unanswered if j.first_s is None and not j.status]
            late = sum(clock.now - j.at > goals.ttft_s for j in unanswered)
            if missed + late > enough:
                return missed + late
    while len(ended) < len(jobs) and clock.step():
        pass
    return missed + sum(not all(meets_objectives(j, goals)) for j in ended[seen:] if j in counted)


def least(
    attains: Callable[[PoolSplit], bool], guess: PoolSplit, report: ProgressPrinter
) -> PoolSplit:
    """Find the smallest split near ``guess`` that attains.

    The search adds workers until a split attains, then removes workers of either role or moves
    them between the roles, in smaller and smaller steps.
    """
    tried: dict[PoolSplit, bool] = {}

    def attained(split: PoolSplit) -> bool:
        if split not in tried:
            tried[split] = split.decode > 0 and split.prefill >= 0 and attains(split)
            report(f"  {split}: {'yes' if tried[split] else 'no'}")
        return tried[split]

    split = guess
    while not attained(split):
        more = max(1, round(0.06 * split.total))
        either = (_more(split, more, 0), _more(split, 0, more))
        split = next((s for s in either if attained(s)), _more(split, more, more))
    step = max(1, round(0.06 * split.total))
    while True:
        smaller = next((s for s in _smaller(split, step) if attained(s)), None)
        if smaller is not None:
            split = smaller
        elif step > 1:
            step //= 2
        else:
            return split


def _more(split: PoolSplit, prefill: int, decode: int) -> PoolSplit:
    return PoolSplit(split.prefill + prefill, split.decode + decode)


def _smaller(split: PoolSplit, step: int) -> list[PoolSplit]:
    """Return the splits with ``step`` fewer workers of either role, or with one moved over."""
    found = [_more(split, -step, 0), _more(split, 0, -step)]
    found += [_more(split, -step - 1, 1), _more(split, 1, -step - 1)]
    return [s for s in found if s.prefill >= 1 and s.decode >= 1]


def allowed_misses(share: float, unavoidable: Sequence[int], requests: Sequence[int]) -> list[int]:
    """Return how many requests of each window may miss their objectives, so that ``share`` of all
    meet them: those that miss with any number of workers, and of the rest the window's part."""
    rest = max(0.0, (1 - share) * sum(requests) - sum(unavoidable)) / max(1, sum(requests))
    until = [math.floor(rest * count + 1e-9) for count in itertools.accumulate(requests)]
    parts = [now - before for before, now in itertools.pairwise([0, *until])]
    return [missed + part for missed, part in zip(unavoidable, parts, strict=True)]


def oracle(
    trial: SplitTrial, guesses: Sequence[PoolSplit], window_s: float, report: ProgressPrinter
) -> float:
    """Return the GPU-hours of the fewest workers for each window by itself, from its guess, with
    which all windows together attain the share."""
    begins = [number * window_s for number in range(len(guesses))]
    windows = [*itertools.pairwise([*begins, trial.ends])]
    unavoidable = [
        trial.misses(PoolSplit(AMPLE * guess.prefill, AMPLE * guess.decode), *window)
        for guess, window in zip(guesses, windows, strict=True)
    ]
    requests = [len(trial.between(*window)) for window in windows]
    allowed = allowed_misses(trial.share, unavoidable, requests)
    hours = 0.0
    for guess, (begin, end), may_miss in zip(guesses, windows, allowed, strict=True):
        found = least(
            partial(trial.misses_at_most, begin=begin, end=end, may_miss=may_miss),
            *(guess, lambda _: None),
        )
        report(f"  {begin:.0f} s: {found}, {may_miss} may miss; by the policy's formulas {guess}")
        hours += found.total * (end - begin) / 3600
    return hours
