"""Prompts that an engine has not taken yet are load from when they are sent."""

from __future__ import annotations

from engine.process.untaken_prompts import LATEST_PROMPTS, UntakenPrompts


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


def test_the_latest_prompts_are_known_by_their_digests() -> None:
    untaken = UntakenPrompts()
    for digest in range(100):
        untaken.add(5, digest)
        untaken.drop_taken(digest)
    assert list(untaken.latest) == list(range(100 - LATEST_PROMPTS, 100))
