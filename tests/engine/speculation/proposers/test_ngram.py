"""Prompt index: against a search through the text, in portions, and as a proposer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.sequence import Phase, Sequence
from engine.speculation.proposers.ngram import (
    INDEX_TOKENS_PER_STEP,
    MAX_MATCH_TOKENS,
    NGRAM_SIZES,
    NgramIndex,
    NgramProposer,
)
from tests.engine.conftest import request
from tests.engine.proposers import Oracle, RandomDraft

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


class Searched:
    """The same, by searching."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._match: tuple[int, int, int] | None = None  # source, length then, tokens matched

    def propose(self, most: int) -> list[int]:
        tokens, length = self._tokens, len(self._tokens)
        match = self._match
        if match is not None and all(
            tokens[match[0] + i] == tokens[match[1] + i] for i in range(length - match[1])
        ):
            came = length - match[1]
            self._match = (match[0] + came, length, match[2] + came)
        else:
            self._match = self._search()
        if self._match is None:
            return []
        source, _, matched = self._match
        found: list[int] = []
        for i in range(min(most, 2 * matched - 1)):
            found.append(tokens[source + i] if source + i < length else found[source + i - length])
        return found

    def _search(self) -> tuple[int, int, int] | None:
        tokens, length = self._tokens, len(self._tokens)
        for n in NGRAM_SIZES:
            for place in range(length - 1, n - 1, -1):
                if tokens[place - n : place] == tokens[length - n :]:
                    matched = max(
                        m
                        for m in range(n, max(n, min(MAX_MATCH_TOKENS, place)) + 1)
                        if tokens[place - m : place] == tokens[length - m :]
                    )
                    return place, length, matched
        return None


@given(texts, st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), max_size=8), st.data())
def test_proposes_what_a_search_finds(
    text: list[int], steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    index, searched = NgramIndex(text), Searched(text)
    for right, most in steps:
        while index.extend(data.draw(st.integers(1, 100))):
            pass
        found = index.propose(most)
        assert found == searched.propose(most)
        text += found[:right]  # so many come true, and then another token
        text.append(data.draw(st.integers(0, 3)))


@given(texts, st.integers(1, 7))
def test_index_extends_by_at_most_the_given_tokens(text: list[int], most: int) -> None:
    index, taken = NgramIndex(text), []
    while (count := index.extend(most)) > 0:
        taken.append(count)
        index.propose(4)  # what is indexed so far does for now
    assert sum(taken) == max(0, len(text) - 1)
    assert all(count <= most for count in taken)


def test_periodic_text_goes_on_as_long_as_wanted() -> None:
    text = [5, 6, 7] * 4
    index = NgramIndex(text)
    index.extend(100)
    assert index.propose(14) == ([5, 6, 7] * 5)[:14]


def test_short_match_yields_few_tokens() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2]
    index = NgramIndex(text)
    index.extend(100)
    assert index.propose(8) == [3]
    text.append(3)
    index.extend(100)
    assert index.propose(8) == [4, 5, 6]  # two tokens match now


def _sequence(lease: int, prompt: list[int]) -> Sequence:
    sequence = Sequence(lease, request(f"r{lease}", prompt), Phase.DECODE)
    sequence.take_row(lease, lease)
    return sequence


def test_drafts_only_for_sequences_with_a_request() -> None:
    proposer = NgramProposer(most=4)
    repeating = [1, 2, 3, 4, 5] * 3
    sequences = [_sequence(i, p) for i, p in enumerate([repeating, [1, 2, 3], repeating])]
    drafts = proposer.propose(sequences, torch.arange(3), [9, 4, 0])
    assert drafts.counts == [4, 0, 0]
    assert drafts.tokens.tolist() == [1, 2, 3, 4]
    assert drafts.parents is None


def test_index_of_ended_row_lease_is_freed() -> None:
    proposer = NgramProposer(most=4)
    proposer.propose([_sequence(0, [1, 2, 1, 2]), _sequence(1, [1])], torch.arange(2), [4, 4])
    proposer.forget([0, 1, 77])
    assert not proposer._indexes


def test_a_long_prompt_takes_several_steps() -> None:
    prompt = [i * i % 4093 for i in range(2 * INDEX_TOKENS_PER_STEP)] + [7, 7, 7, 9, 8, 1]
    prompt += prompt[10:14]  # found in the first portion
    sequence = _sequence(0, prompt)
    proposer = NgramProposer(most=4)
    rows = torch.zeros(1, dtype=torch.int64)
    first = proposer.propose([sequence], rows, [4])
    assert first.tokens.tolist() == prompt[14:18]
    index = proposer._indexes[0]
    assert index._indexed == 1 + INDEX_TOKENS_PER_STEP
    for _ in range(2):
        proposer.propose([sequence], rows, [4])
    assert index._indexed == len(prompt)


def test_test_proposers_follow_the_protocol() -> None:
    text = list(range(3, 40))
    sequence = _sequence(0, text[:10])
    rows = torch.zeros(1, dtype=torch.int64)
    for width in (1, 3):
        sure = Oracle(lambda s: text, 320, most=6, right=1.0, width=width)
        drafts = sure.propose([sequence], rows, [6])
        parents, tokens = drafts.parents_of(0), drafts.tokens.tolist()
        path, last = [], -1
        for place in range(10, 10 + 6 // width):
            last = next(i for i in range(6) if parents[i] == last and tokens[i] == text[place])
            path.append(last)
        assert len(path) == 6 // width
        children = [(p, t) for p, t in zip(parents, tokens, strict=True)]
        assert len(set(children)) == len(children)
    guess = RandomDraft(320, most=8).propose([sequence], rows, [5])
    assert guess.counts == [5]
    assert 0 <= min(guess.tokens.tolist()) <= max(guess.tokens.tolist()) < 320
