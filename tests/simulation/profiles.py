"""What the seeds vary. Each seed has one profile, which stresses some part of the cluster.

A fault is found sooner where what it needs comes together than where everything happens a little:
Groce et al., "Swarm Testing" (ISSTA 2012). ``profile_of`` deals the profiles out in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ALL_KINDS: Mapping[str, int] = {
    "pause router": 4,
    "pause front": 3,
    "pause engine": 2,
    "kill engine": 3,
    "kill front": 2,
    "cut": 3,
    "cut one way": 2,
    "slow link": 2,
    "slow engine": 2,
    "break carrier": 2,
    "redis": 2,
    "lapse": 1,
    "drain": 2,
    "kill router": 1,
}
"""Weights of the kinds of faults."""


class Profile(NamedTuple):
    """The distributions of one kind of seeds; every tuple is a choice of equal weight."""

    name: str
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 0))
    routers: tuple[int, ...] = (1, 1, 1, 2)
    kinds: Mapping[str, int] = ALL_KINDS
    faults: tuple[int, ...] = (0, 1, 2, 3, 4)
    requests: tuple[int, ...] = (2, 3, 4, 6)
    arrivals_s: float = 2.0
    faults_s: float = 3.0  # they begin until then
    lengths: tuple[int, ...] = (3, 17, 33, 60, 100, 150)
    max_tokens: tuple[int, ...] = (1, 2, 8, 16, 40, 80)
    priorities: tuple[int, ...] = (0, 0, 0, 5, 10)
    hang_ups: float = 0.2
    hang_up_s: tuple[float, ...] = (0.0, 0.003, 0.1, 0.5)
    latency_s: tuple[float, ...] = (0.001, 0.005)
    base_s: tuple[float, ...] = (0.005, 0.02, 0.05)
    token_s: tuple[float, ...] = (0.0001, 0.001, 0.004)
    chunks: tuple[int, ...] = (32, 64, 128)
    pages: tuple[int, ...] = (12, 16, 24, 48)
    token_timeout_s: float = 84.0
    pauses_again: float = 0.1  # share of the pauses of a router that come three times


MIXED = Profile("mixed")

HANG_UPS = Profile(
    "hang-ups",  # of requests whose submits wait for a worker that stands still
    shapes=((1, 0), (1, 0), (1, 1)),
    routers=(1,),
    kinds={"pause front": 1},
    faults=(1, 1, 2),
    requests=(6, 8),
    arrivals_s=0.8,
    faults_s=0.5,
    lengths=(100, 150, 200),
    max_tokens=(80,),
    hang_ups=0.6,
    hang_up_s=(0.02, 0.1, 0.5),
    base_s=(0.05,),
    token_s=(0.0001,),
    pages=(48,),
)

ROUTER_PAUSES = Profile(
    "router pauses",
    shapes=((1, 0), (1, 1), (2, 1)),
    routers=(1,),
    kinds={"pause router": 1},
    faults=(1,),
    requests=(1, 2),
    arrivals_s=0.3,
    faults_s=1.0,
    max_tokens=(80,),
    hang_ups=0.0,
    base_s=(0.05,),
    pauses_again=1.0,
)

PREFILL_QUEUES = Profile(
    "prefill queues",
    shapes=((1, 1), (2, 1)),
    routers=(2, 3),
    kinds={"kill router": 1, "redis": 1},
    faults=(0, 0, 0, 1),
    requests=(6, 8),
    arrivals_s=3.0,
    lengths=(100, 150, 200, 250),
    max_tokens=(1, 2),
    priorities=(0, 0, 5, 10),
    hang_ups=0.0,
    token_s=(0.01, 0.02),
    pages=(24, 48),
)

DEATHS = Profile(
    "deaths",
    kinds={"kill engine": 4, "kill front": 3, "pause engine": 2, "drain": 1, "break carrier": 1},
    faults=(1, 2, 3),
    lengths=(33, 100, 150),
    max_tokens=(8, 40),
    hang_ups=0.0,
    pages=(12, 16),
)

MEMORY = Profile(
    "memory",
    shapes=((1, 0), (1, 1), (1, 2)),
    faults=(0, 1, 2),
    requests=(5, 6),
    arrivals_s=0.6,
    lengths=(33, 60, 100),
    max_tokens=(40, 60),
    priorities=(0, 0, 5),
    hang_ups=0.35,
    hang_up_s=(0.1, 0.2, 0.4, 0.8),
    base_s=(0.005, 0.02),
    pages=(9, 10, 12),
)

DEADLINES = Profile(
    "deadlines",
    faults=(0, 1, 2),
    requests=(4, 6),
    lengths=(33, 100, 150),
    max_tokens=(2, 40, 80),
    hang_ups=0.0,
    base_s=(0.02, 0.05),
    token_s=(0.001, 0.01),
    token_timeout_s=1.4,
)

PROFILES = (
    *(MIXED, HANG_UPS, MIXED, DEATHS, MEMORY),
    *(PREFILL_QUEUES, MIXED, DEADLINES, DEATHS, ROUTER_PAUSES),
)


def profile_of(seed: int) -> Profile:
    """Return the profile of a seed."""
    return PROFILES[seed % len(PROFILES)]


def seeds_of(profile: Profile, count: int) -> list[int]:
    """Return the first ``count`` seeds with this profile."""
    return [s for s in range(count * len(PROFILES)) if profile_of(s) is profile][:count]
