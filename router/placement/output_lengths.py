"""How many tokens a request will bring, learned from the answers that have ended.

    all requests --prior--> requests with about this max_tokens --prior--> those of this tenant

Each level is a mean that forgets (``_ForgettingMean``). A mean of few answers is shrunk towards the
level above it, with the weight of ``PRIOR_ANSWERS`` answers: the empirical Bayes estimate of
Bühlmann, "Experience rating and credibility" (ASTIN Bulletin 1967), with a fixed credibility.
``max_tokens`` counts as its power of two. ``RoutingEstimates`` owns the one of a router.
"""

from __future__ import annotations

from collections import OrderedDict

INITIAL_OUTPUT_TOKENS = 128.0
"""Mean before any answer has ended."""
PRIOR_ANSWERS = 8.0
"""Answers that a mean needs to weigh as much as the level above it."""
MEMORY_ANSWERS = 64.0
"""An answer counts 1/e after so many others of its level."""
MAX_TENANT_MEANS = 4096
"""Pairs of tenant and power of two that are kept; the one unused longest is dropped."""


class _ForgettingMean:
    """An exponentially weighted mean that is exact while it has few values."""

    __slots__ = ("mean", "weight")

    def __init__(self) -> None:
        self.mean = 0.0
        self.weight = 0.0  # number of values, at most MEMORY_ANSWERS

    def add(self, value: float) -> None:
        self.weight = min(MEMORY_ANSWERS, self.weight + 1)
        self.mean += (value - self.mean) / self.weight

    def shrunk(self, prior: float) -> float:
        """Return the mean, drawn towards ``prior`` the more the fewer values it has."""
        return prior + (self.mean - prior) * self.weight / (self.weight + PRIOR_ANSWERS)


class OutputLengths:
    """Expected output tokens by tenant and ``max_tokens``. Bounded in memory."""

    def __init__(self) -> None:
        self._all = _ForgettingMean()
        self._all.add(INITIAL_OUTPUT_TOKENS)
        self._by_limit: dict[int, _ForgettingMean] = {}
        self._by_tenant: OrderedDict[tuple[str, int], _ForgettingMean] = OrderedDict()

    @property
    def mean(self) -> float:
        """Return the mean output tokens of all requests."""
        return self._all.mean

    def expected(self, tenant: str, limit: int) -> float:
        """Return the expected output tokens of a request with ``max_tokens`` of ``limit``."""
        power = limit.bit_length()
        expected = self._all.mean
        if (of_limit := self._by_limit.get(power)) is not None:
            expected = of_limit.shrunk(expected)
        if (of_tenant := self._by_tenant.get((tenant, power))) is not None:
            expected = of_tenant.shrunk(expected)
        return min(float(limit), expected)

    def record(self, tenant: str, limit: int, tokens: int) -> None:
        """Learn from an answer of ``tokens`` that has ended."""
        power = limit.bit_length()
        self._all.add(tokens)
        self._by_limit.setdefault(power, _ForgettingMean()).add(tokens)
        self._by_tenant.setdefault((tenant, power), _ForgettingMean()).add(tokens)
        self._by_tenant.move_to_end((tenant, power))
        if len(self._by_tenant) > MAX_TENANT_MEANS:
            self._by_tenant.popitem(last=False)
