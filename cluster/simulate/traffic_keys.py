"""The scenario's section `traffic`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from cluster.config.fields import Section
from cluster.simulate.machine_keys import NotNegative, Positive
from cluster.workloads.arrivals import ArrivalKind
from cluster.workloads.lengths import FORMS, parse_length
from protocol.errors import StartupError


def _length(given: object) -> object:
    try:
        return parse_length(str(given), "tokens")
    except StartupError:
        raise ValueError(f"expected {FORMS}, not {given!r}") from None


Tokens: TypeAlias = Annotated[Any, BeforeValidator(_length)]


class RateSection(Section):
    """``rate`` requests a second from ``at_s`` on."""

    at_s: NotNegative
    rate: NotNegative


class SineSection(Section):
    """A day: rate * (1 + amplitude * sin(2 pi (t/period_s - phase - 1/4))): least at the beginning,
    or ``phase`` of a period later."""

    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.5
    period_s: Positive = 86400.0
    phase: Annotated[float, Field(ge=0, le=1)] = 0.0


class MixSection(Section):
    """Requests of one kind, from ``from_s`` on for ``for_s``."""

    rate: NotNegative | None = None
    rates: tuple[RateSection, ...] = ()
    sine: SineSection | None = None
    arrivals: ArrivalKind = "poisson"
    burstiness: Positive = 1.0
    prompt: Tokens
    output: Tokens
    prefix: Tokens | None = None  # tokens at the beginning of a prompt, shared within a group
    groups: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    from_s: NotNegative = 0.0
    for_s: Positive | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> MixSection:
        if (self.rate is None) == (not self.rates):
            raise ValueError("expected rate, or rates (a list of at_s and rate)")
        if any(a.at_s >= b.at_s for a, b in zip(self.rates, self.rates[1:], strict=False)):
            raise ValueError("rates: expected at_s in ascending order")
        return self


class TrafficSection(Section):
    """A trace of Mooncake (.jsonl) or Azure (.csv), or mixes, or both."""

    trace: str | None = None
    speed: Positive = 1.0  # of the trace: 2 halves the time between requests
    copies: Annotated[int, Field(ge=1, le=100_000)] = 1  # of it, with prefixes of their own
    spread_s: NotNegative = 30.0  # the copies begin within so many seconds
    scale: Positive = 1.0  # of the trace's lengths
    mixes: tuple[MixSection, ...] = ()

    @model_validator(mode="after")
    def _some(self) -> TrafficSection:
        if self.trace is None and not self.mixes:
            raise ValueError("expected trace, or mixes")
        return self
