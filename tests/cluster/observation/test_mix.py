"""From what routers counted to samples of requests."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from cluster.observation.request_mix import RequestCounter, request_samples
from cluster.sizing.snapshot import RequestSample
from router.placement.output_lengths import INITIAL_OUTPUT_TOKENS


def mean(of: tuple[RequestSample, ...], field: str) -> float:
    return sum(getattr(s, field) * s.weight for s in of)


def test_means_are_exact_and_lengths_uncorrelated() -> None:
    rng, counter = random.Random(1), RequestCounter()
    cached, uncached, outputs = [], [], []
    for _ in range(3000):
        cached.append(rng.choice((0, 512)))
        uncached.append(max(1, round(rng.lognormvariate(6, 1.2))))
        outputs.append(max(1, round(rng.lognormvariate(5, 1.2))))
        counter.arrived(cached[-1] + uncached[-1])
        counter.first_token(cached[-1] + uncached[-1], cached[-1], 0.1)
        counter.ended(cached[-1] + uncached[-1], outputs[-1], 0.02)
    of = request_samples(counter.take(60.0))
    assert sum(s.weight for s in of) == pytest.approx(1.0)
    assert len(of) < 80
    assert mean(of, "uncached") == pytest.approx(sum(uncached) / 3000)
    assert mean(of, "cached") == pytest.approx(sum(cached) / 3000)
    assert mean(of, "output") == pytest.approx(sum(outputs) / 3000)
    both = sum(s.uncached * s.output * s.weight for s in of)
    assert both / mean(of, "uncached") / mean(of, "output") == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("longest", ["prompts", "outputs"])
def test_the_kv_of_sequences_is_exact(longest: str) -> None:
    """Long prompts with short outputs beside short prompts with long ones, or both together."""
    rng, counter, pairs = random.Random(2), RequestCounter(), 0
    for _ in range(3000):
        is_long = rng.random() < 0.4
        prompt = 256 + max(1, round(rng.lognormvariate(8 if is_long else 6, 0.6)))
        writes = is_long == (longest == "outputs")
        output = max(1, round(rng.lognormvariate(8 if writes else 5, 0.6)))
        pairs += prompt * output
        counter.arrived(prompt)
        counter.first_token(prompt, 256, 0.1)
        counter.ended(prompt, output, 0.02)
    counted = counter.take(60.0)
    of = request_samples(counted)
    assert sum((s.uncached + s.cached) * s.output * s.weight for s in of) == pytest.approx(
        pairs / 3000, rel=1e-6
    )
    assert mean(of, "output") == pytest.approx(counted.outputs.mean)
    assert mean(of, "uncached") == pytest.approx(counted.uncached.mean)
    apart = mean(of, "output") * (mean(of, "uncached") + mean(of, "cached"))
    assert apart != pytest.approx(pairs / 3000, rel=0.3), "as if they were uncorrelated"


@pytest.mark.parametrize("pairs", [1.0, 1e18])
def test_outputs_that_cannot_be_leave_means_as_they_are(pairs: float) -> None:
    counter = RequestCounter()
    for tokens in (100, 300, 800):
        counter.first_token(tokens, 0, 0.1)
        counter.ended(tokens, tokens, 0.02)
    of = request_samples(replace(counter.take(1.0), output_pairs=pairs))
    assert (mean(of, "uncached"), mean(of, "output")) == pytest.approx((400, 400))
    assert min(s.weight for s in of) > 0


@pytest.mark.parametrize("longest_first", [False, True])
def test_the_pairs_of_uncached_and_cached_tokens_are_exact(longest_first: bool) -> None:
    """Where little is uncached, much is cached, or the other way round."""
    rng, counter, pairs = random.Random(2), RequestCounter(), 0
    for _ in range(3000):
        uncached = max(1, round(rng.lognormvariate(6, 1.0)))
        cached = rng.choice((0, 512)) + 512 * ((uncached > 600) == longest_first)
        pairs += uncached * cached
        counter.arrived(cached + uncached)
        counter.first_token(cached + uncached, cached, 0.1)
    counted = counter.take(60.0)
    of = request_samples(counted)
    assert sum(s.uncached * s.cached * s.weight for s in of) == pytest.approx(pairs / 3000)
    assert mean(of, "cached") == pytest.approx(
        (counted.answered_tokens - counted.uncached.total) / 3000
    )
    assert mean(of, "uncached") * mean(of, "cached") * 3000 != pytest.approx(pairs, rel=0.2)


@pytest.mark.parametrize("pairs", [1.0, 1e18])
def test_pairs_that_cannot_be_leave_means_as_they_are(pairs: float) -> None:
    counter = RequestCounter()
    for uncached in (100, 300, 800):
        counter.first_token(400 + uncached, 400, 0.1)
    of = request_samples(replace(counter.take(1.0), cached_pairs=pairs))
    assert (mean(of, "uncached"), mean(of, "cached")) == pytest.approx((400, 400))
    assert min(s.cached for s in of) == pytest.approx(0)


def test_without_pairs_cached_tokens_are_uncorrelated() -> None:
    counter = RequestCounter()
    for uncached in (100, 300, 800):
        counter.first_token(400 + uncached, 400, 0.1)
    of = request_samples(replace(counter.take(1.0), cached_pairs=0.0))
    assert {round(s.cached, 6) for s in of} == {400.0}


def test_prompts_that_are_queued_or_refused_count() -> None:
    counter = RequestCounter()
    for _ in range(10):
        counter.arrived(100)
        counter.first_token(100, 50, 0.1)
    for _ in range(10):
        counter.arrived(900)  # no token yet
    of = request_samples(counter.take(1.0))
    assert mean(of, "uncached") == pytest.approx(250)  # half of what arrived
    assert mean(of, "cached") == pytest.approx(250)


def test_before_the_first_token_nothing_is_taken_to_be_cached() -> None:
    counter = RequestCounter()
    counter.arrived(400)
    of = request_samples(counter.take(1.0))
    assert mean(of, "uncached") == pytest.approx(400)
    assert {(s.cached, s.output) for s in of} == {(0.0, INITIAL_OUTPUT_TOKENS)}


def test_prompts_that_nobody_looked_at_are_as_those_answered() -> None:
    counter = RequestCounter()
    counter.first_token(300, 100, 0.1)
    of = request_samples(counter.take(1.0))
    assert mean(of, "uncached") == pytest.approx(200)
    assert mean(of, "cached") == pytest.approx(100)


def test_whole_prompts_may_be_cached() -> None:
    counter = RequestCounter()
    counter.arrived(64)
    counter.first_token(64, 64, 0.1)
    of = request_samples(counter.take(1.0))
    assert (mean(of, "uncached"), mean(of, "cached")) == pytest.approx((0, 64))


def test_nothing_counted_is_nothing_known() -> None:
    counter = RequestCounter()
    assert request_samples(counter.take(5.0)) == ()
    counter.arrived(10)
    counter.take(5.0)
    assert counter.take(5.0).arrivals == 0
