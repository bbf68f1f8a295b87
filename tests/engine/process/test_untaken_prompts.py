"""Prompts that an engine has not taken yet are load from when they are sent."""

from __future__ import annotations

from engine.process.untaken_prompts import (
    LATEST_PROMPTS,
    MOST_NAMED,
    NAMED_S,
    UntakenPrompts,
)
from router.placement import ledger
from router.placement.unreported_prompts import UNREPORTED_S


def test_prompts_count_until_the_engine_has_taken_them() -> None:
    untaken = UntakenPrompts()
    for tokens in (10, 20, 30):
        untaken.add(tokens, 1)
    assert (untaken.prompts, untaken.tokens) == (3, 60)
    untaken.drop_taken(2)
    assert (untaken.prompts, untaken.tokens) == (1, 30)
    untaken.add(40, 1)
    untaken.drop_taken(2)  # a beat from before it was sent
    assert (untaken.prompts, untaken.tokens) == (2, 70)
    untaken.drop_taken(4)
    assert (untaken.prompts, untaken.tokens) == (0, 0)


def test_an_engine_that_counts_more_than_was_sent_changes_nothing() -> None:
    untaken = UntakenPrompts()
    untaken.drop_taken(9)
    assert (untaken.prompts, untaken.tokens) == (0, 0)
    untaken.add(5, 1)
    assert (untaken.prompts, untaken.tokens) == (1, 5)


def test_prompts_are_named_for_a_while_and_the_latest_ones_for_longer() -> None:
    now = 0.0
    untaken = UntakenPrompts(lambda: now)
    for digest in range(100):
        untaken.add(5, digest)
        untaken.drop_taken(digest)
    now = 0.9 * NAMED_S
    assert untaken.latest.digests() == tuple(range(100))
    untaken.add(5, 100)
    now = 1.1 * NAMED_S
    assert untaken.latest.digests() == tuple(range(101 - LATEST_PROMPTS, 101))


def test_named_prompts_are_bounded() -> None:
    untaken = UntakenPrompts(lambda: 0.0)
    for digest in range(2 * MOST_NAMED):
        untaken.add(5, digest)
    assert untaken.latest.digests() == tuple(range(MOST_NAMED, 2 * MOST_NAMED))


def test_routers_take_what_workers_name_and_wait_less_long_for_it() -> None:
    assert ledger.MOST_NAMED == MOST_NAMED
    assert UNREPORTED_S < NAMED_S
