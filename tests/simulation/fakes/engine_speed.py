"""The sizes of a simulated engine, and how long its work takes."""

from __future__ import annotations

import random

from engine.scheduling.step_policy import StepPlan
from tests.simulation.profiles import Profile

MOST_S = 1.5
"""The longest step; an engine that is silent for 3.5 s is replaced."""


class EngineSpeed:
    """The sizes of one engine, and how long its work takes, drawn from ``rng``."""

    def __init__(self, rng: random.Random, profile: Profile, pages: int) -> None:
        self._rng = rng
        self.pages = pages
        self.max_model_len = 512
        self.max_batch = rng.choice((2, 4, 8))
        self.chunk = rng.choice(profile.chunks)
        self.load_s = rng.uniform(0.2, 1.5)
        self.base_s = rng.choice(profile.base_s)
        self.token_s = rng.choice(profile.token_s)
        self._copy_s = rng.choice((0.001, 0.003, 0.03))
        self._reports_slow = rng.random() < 0.8
        self.slow = 1.0  # factor that a fault sets
        self.longest_step_s = 0.5

    def step_model(self, role: str) -> tuple[float, ...]:
        """Return the coefficients that the worker reports. A decode worker says as a rule that it
        is slow with prompts, so that routers have most of them handed over."""
        factor = 10.0 if role == "decode" and self._reports_slow else 1.0
        return self.base_s, 0.0, 0.0, factor * self.token_s, 0.0

    @property
    def most_s(self) -> float:
        """Return the seconds of the longest step without a fault."""
        return min(1.3 * (self.base_s + self.token_s * self.chunk), MOST_S)

    def step_s(self, plan: StepPlan) -> float:
        seconds = self.base_s + self.token_s * plan.work.prompt_tokens
        return min(self.slow * seconds * self._rng.uniform(0.8, 1.3), MOST_S)

    def frame_s(self) -> float:
        """Return the seconds that one frame takes to copy."""
        return self.slow * self._rng.uniform(0.1, 1.0) * self._copy_s
