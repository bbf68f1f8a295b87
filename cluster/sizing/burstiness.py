"""How unevenly requests arrive, and how long prompts wait because of that. Pure.

Where many users or agents act together, requests come in bursts, which queue models with Poisson
arrivals do not know. Bursts that last less than a few minutes are over before more workers have
started: pools must have room for them. What changes more slowly is followed by more workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cluster.sizing.queueing import CHANCE_DEVIATIONS, SampleVector
from cluster.sizing.snapshot import Arrivals

LOCAL_S = 300.0
"""Arrivals are relative to their mean over this time, which is that of the longest window of the
mix: the load follows what is slower."""
LONGEST_S = 80.0
"""Seconds of the longest counts that dispersions are computed of: a little more than the default of
``autoscaler.start_s``, because more workers can follow what changes more slowly."""
MIN_COUNTS = 6
"""Counts that a dispersion is computed from, at least."""


def dispersion(counts: Sequence[float] | SampleVector, least: float) -> float:
    """Return the variance over the mean of successive counts. It is taken between neighbours,
    without the two that differ most, so that neither a trend nor a step counts. ``least``: its
    value if requests arrive one by one."""
    values = np.asarray(counts, dtype=np.float64)
    if len(values) < 3:
        return least
    squares, sums = np.diff(values) ** 2, values[1:] + values[:-1]
    largest = int(squares.argmax())
    total = float(sums.sum() - sums[largest])
    return max(least, float(squares.sum() - squares[largest]) / total) if total > 0 else least


def arrival_dispersion(arrivals: Arrivals, intervals: int) -> float:
    """Return the index of dispersion of the requests that arrive in so many intervals: their
    variance over their mean (Gusella, "Characterizing the variability of arrival processes with
    indexes of dispersion", IEEE JSAC 9(2), 1991). It is 1 where they arrive one by one (Poisson),
    and where too little is known.

    Neighbouring counts of t seconds differ by what changes as quickly as that. So the variance of a
    count of t about the mean of a longer time is a sum over t, 2*t, 4*t, ... of what neighbours
    differ by (the Haar wavelet variance): I(t) = (D(t) + I(2*t))/2.
    """
    known = len(arrivals.counts) // intervals
    if known < MIN_COUNTS:
        return 1.0
    counts = np.array(arrivals.counts[-known * intervals :], dtype=np.float64)
    found = dispersion(counts.reshape(known, intervals).sum(axis=1), least=1.0)
    if 2 * intervals * arrivals.interval_s > LONGEST_S or known < 2 * MIN_COUNTS:
        return found
    return (found + arrival_dispersion(arrivals, 2 * intervals)) / 2.0


def burstiness(arrivals: Arrivals, seconds: float) -> float:
    """Return by how much the index of dispersion of arrivals in so many seconds exceeds that of
    requests that arrive one by one; 0 where chance explains it.

    It is known for 1, 2, 4, ... intervals, and interpolated between them: of a short history, the
    indexes of other numbers of intervals differ much by chance."""
    exact = max(1.0, seconds / arrivals.interval_s)
    fewer = 1 << math.floor(math.log2(exact))
    share = exact / fewer - 1.0
    more = _excess_dispersion(arrivals, 2 * fewer) if share > 0 else 0.0
    return (1.0 - share) * _excess_dispersion(arrivals, fewer) + share * more


def _excess_dispersion(arrivals: Arrivals, intervals: int) -> float:
    """Return by how much the index of dispersion of so many intervals exceeds 1 and what chance
    explains. Of n counts of requests that arrive one by one, it is 1 with a variance of 2/n."""
    known = len(arrivals.counts) // intervals
    if not known:
        return 0.0
    chance = CHANCE_DEVIATIONS * math.sqrt(2.0 / known)
    return max(0.0, arrival_dispersion(arrivals, intervals) - 1.0 - chance)


class ArrivalRates(NamedTuple):
    """Requests/s in successive intervals."""

    interval_s: float
    rates: SampleVector  # [intervals]


NO_ARRIVAL_RATES = ArrivalRates(1.0, np.zeros(0))


def levelled(values: SampleVector, level: float, interval_s: float) -> SampleVector:
    """Return the values of successive intervals as if their mean in LOCAL_S around each had been
    ``level``.

    Deviations from the mean grow with the root of the mean, as those of a sum of independent users
    do.
    """
    half = max(1, round(LOCAL_S / 2 / interval_s))
    total = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    means = (total[last] - total[first]) / (last - first)
    growth = np.divide(level, means, out=np.zeros_like(values), where=means > 0)
    return np.asarray(np.maximum(level + (values - means) * np.sqrt(growth), 0.0))


def usual_bursts(arrivals: Arrivals, rate: float) -> ArrivalRates:
    """Return the requests/s of each interval, if their mean in LOCAL_S around it had been
    ``rate``."""
    rates = np.array(arrivals.counts, dtype=np.float64) / arrivals.interval_s
    if not rates.any() or rate <= 0:
        return NO_ARRIVAL_RATES
    found = levelled(rates, rate, arrivals.interval_s)
    return ArrivalRates(arrivals.interval_s, found * (rate / max(float(found.mean()), 1e-9)))


def burst_waits(
    servers: int, mean_s: float, patience_s: SampleVector, arrivals: ArrivalRates
) -> SampleVector:
    """Return for each of ``patience_s`` the share of prompts that wait longer, if each takes
    ``mean_s``.

    Work is a fluid: what waits after an interval is what waited before and came, less what the
    servers can do (Lindley, "The theory of queues with a single server", 1952). Of it, a prompt
    waits for all but its own. Waits that are shorter than an interval are underestimated.
    """
    total = float(arrivals.rates.sum())
    if servers <= 0 or total <= 0:
        return np.zeros_like(patience_s)
    surplus = np.cumsum((arrivals.rates * mean_s - servers) * arrivals.interval_s)
    lowest = np.minimum(np.minimum.accumulate(surplus), 0.0)
    waits_s = np.maximum(surplus - lowest - mean_s, 0.0) / servers  # without the prompt's own work
    order = np.argsort(waits_s)
    until = np.concatenate(([0.0], np.cumsum(arrivals.rates[order])))
    shorter = until[np.searchsorted(waits_s[order], patience_s, side="right")]
    return np.asarray(1.0 - shorter / until[-1])
