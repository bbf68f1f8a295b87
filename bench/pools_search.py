"""The least workers that attain so much: searches over splits, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from cluster.simulate.job import Job
from cluster.simulate.machines import machines
from cluster.simulate.result import met
from cluster.simulate.run import World
from cluster.simulate.scenario import PoolsSection, Scenario
from cluster.simulate.traffic import requests
from cluster.sizing.policy import decide

LOOK_EVERY = 200
"""Requests after which it is asked whether the mark can still be reached."""
LEAD_S = 60.0
"""A window is played with the traffic of so long before it, which does not count."""

Say = Callable[[str], None]


class Split(NamedTuple):
    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


class Trial:
    """``attains``: whether a fixed split meets both objectives for ``share`` of the requests."""

    def __init__(self, scenario: Scenario, share: float = 1.0) -> None:
        self.runs = 0
        self.share = share
        self.scenario = scenario
        self.machines = machines(scenario)
        self._jobs = requests(scenario)

    @property
    def ends(self) -> float:
        return self._jobs[-1].at

    def between(self, begin: float, end: float) -> list[Job]:
        return [job for job in self._jobs if begin <= job.at < end]

    def attains(self, split: Split, begin: float = 0.0, end: float = float("inf")) -> bool:
        """Only requests that arrive from ``begin`` to ``end`` count."""
        self.runs += 1
        jobs = [
            Job(j.number, j.at - begin + LEAD_S, j.prompt, j.output, j.blocks)
            for j in self.between(begin - LEAD_S, end)
        ]
        counted = [job for job in jobs if job.at >= LEAD_S or not begin]
        may_miss = int((1 - self.share) * len(counted) + 1e-9)
        pools = PoolsSection(prefill=split.prefill, decode=split.decode)
        scenario = self.scenario.model_copy(update={"pools": pools})
        world = World(scenario, self.machines, decide, False)
        return _misses(world, jobs, set(counted), may_miss) <= may_miss


def _misses(world: World, jobs: Sequence[Job], counted: set[Job], enough: int) -> int:
    """Of ``counted``; more than ``enough`` as soon as there are."""
    clock, ended, missed, seen = world.clock, world.life.ended, 0, 0
    goals = world.goals
    for number, job in enumerate(jobs):
        clock.run_before(job.at)
        world.life.arrive(job)
        if number % LOOK_EVERY == 0 or job is jobs[-1]:
            missed += sum(not all(met(j, goals)) for j in ended[seen:] if j in counted)
            seen = len(ended)
            late = sum(
                j.first_s is None and clock.now - j.at > goals.ttft_s for j in _inside(world)
            )
            if missed + late > enough:
                return missed + late
    while len(ended) < len(jobs) and clock.step():
        pass
    missed += sum(not all(met(j, goals)) for j in ended[seen:] if j in counted)
    return missed


def _inside(world: World) -> set[Job]:
    return {job for worker in world.fleet.workers for job in worker.jobs}


def least(attains: Callable[[Split], bool], guess: Split, say: Say) -> Split:
    """The smallest split near ``guess`` that attains: up from it until one does, then down one
    worker at a time, whichever role can spare it, and one over from role to role."""
    tried: dict[Split, bool] = {}

    def try_(split: Split) -> bool:
        if split not in tried:
            tried[split] = split.decode > 0 and split.prefill >= 0 and attains(split)
            say(f"  {split}: {'yes' if tried[split] else 'no'}")
        return tried[split]

    split = guess
    while not try_(split):
        more = max(1, round(0.06 * split.total))
        either = (_more(split, more, 0), _more(split, 0, more))
        split = next((s for s in either if try_(s)), _more(split, more, more))
    step = max(1, round(0.06 * split.total))
    while True:
        smaller = next((s for s in _smaller(split, step) if try_(s)), None)
        if smaller is not None:
            split = smaller
        elif step > 1:
            step //= 2
        else:
            return split


def _more(split: Split, prefill: int, decode: int) -> Split:
    return Split(split.prefill + prefill, split.decode + decode)


def _smaller(split: Split, step: int) -> list[Split]:
    """``step`` workers less: of one role, of the other, or with one moved over."""
    found = [_more(split, -step, 0), _more(split, 0, -step)]
    found += [_more(split, -step - 1, 1), _more(split, 1, -step - 1)]
    return [s for s in found if s.prefill >= 1 and s.decode >= 1]


def oracle(trial: Trial, guesses: Sequence[Split], window_s: float, say: Say) -> float:
    """GPU-hours of the least workers for each window by itself; the search begins at its guess."""
    hours = 0.0
    for number, guess in enumerate(guesses):
        begin = number * window_s
        end = trial.ends if number == len(guesses) - 1 else begin + window_s
        found = least(partial(trial.attains, begin=begin, end=end), guess, lambda _: None)
        say(f"  {begin:.0f} s: {found}; by the policy's formulas {guess}")
        hours += found.total * (end - begin) / 3600
    return hours
