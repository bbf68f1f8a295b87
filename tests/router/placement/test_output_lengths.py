"""Expected output tokens, by tenant and ``max_tokens``."""

from __future__ import annotations

import pytest

from router.placement.output_lengths import (
    INITIAL_OUTPUT_TOKENS,
    MAX_TENANT_MEANS,
    PRIOR_ANSWERS,
    OutputLengths,
)


def test_each_tenant_has_its_own_mean_for_each_size_of_request() -> None:
    learned = OutputLengths()
    assert learned.expected("a", 4096) == INITIAL_OUTPUT_TOKENS
    assert learned.expected("a", 20) == 20
    for _ in range(400):
        learned.record("a", 4096, 1000)
        learned.record("a", 256, 10)
        learned.record("b", 4096, 100)
    assert learned.expected("a", 4096) == pytest.approx(1000, rel=0.1)
    assert learned.expected("a", 5000) == pytest.approx(1000, rel=0.1), "the same power of two"
    assert learned.expected("a", 256) < 20
    assert learned.expected("b", 4096) == pytest.approx(100, rel=0.6)
    assert 100 < learned.expected("a new one", 4096) < 1000
    assert learned.mean == pytest.approx(370, rel=0.1)


def test_few_answers_of_a_tenant_count_little() -> None:
    learned = OutputLengths()
    for _ in range(400):
        learned.record("others", 1000, 100)
    learned.record("a", 1000, 1000)
    prior = learned.expected("others", 1000)
    expected = learned.expected("a", 1000)
    assert prior < expected < prior + 2 * (1000 - prior) / PRIOR_ANSWERS


def test_what_was_long_ago_is_forgotten() -> None:
    learned = OutputLengths()
    for tokens in (*[1000] * 500, *[50] * 400):
        learned.record("a", 2048, tokens)
    assert learned.expected("a", 2048) == pytest.approx(50, rel=0.1)


def test_memory_is_bounded_and_the_tenant_unused_longest_goes_first() -> None:
    learned = OutputLengths()
    for _ in range(100):
        learned.record("first", 512, 400)
    for number in range(MAX_TENANT_MEANS - 1):
        learned.record(f"tenant {number}", 512, 10)
    assert learned.expected("first", 512) > 300
    learned.record("one more", 512, 10)
    assert len(learned._by_tenant) == MAX_TENANT_MEANS
    assert learned.expected("first", 512) < 50
