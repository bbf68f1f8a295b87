"""What a grammar does not allow is not drawn, and changes nothing of how the rest is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling import filters
from engine.sampling.sampler import Sampler
from engine.structured_output.masks import ForbiddenTokens
from protocol.sampling_params import SamplingParams
from tests.engine.sampling_oracle import EOS, options, seated
from tests.engine.test_sampling_engine import KINDS

VOCAB = 20_000
PROMPT, OUTPUT = [5, 6, 7, 5], [7, 8, 8]
AT = torch.tensor([len(PROMPT) + len(OUTPUT)])


def drawn(
    samplings: list[SamplingParams], logits: torch.Tensor, barred: ForbiddenTokens | None
) -> list[int]:
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB)
    positions = AT.expand(len(samplings))
    return Sampler(table)(sequences, logits.clone(), rows, positions, barred).read()[0]


def bars(rows: int, left: int, seed: int = 0) -> torch.Tensor:
    """All but ``left`` tokens of each row: [rows, VOCAB]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, VOCAB, generator=generator).argsort(dim=-1)
    return torch.ones(rows, VOCAB, dtype=torch.bool).scatter_(1, order[:, :left], False)


def everything() -> tuple[list[SamplingParams], torch.Tensor]:
    kinds = [kind for kind in KINDS if "allowed_token_ids" not in kind]  # they may share no token
    samplings = [options(seed=i, **kinds[i % len(kinds)]) for i in range(2 * len(kinds))]
    generator = torch.Generator().manual_seed(1)
    return samplings, torch.randn(len(samplings), VOCAB, generator=generator) * 3


@pytest.mark.parametrize("left", [1, 5, 300, 15_000])
def test_forbidden_tokens_equal_logits_of_minus_infinity(left: int) -> None:
    samplings, logits = everything()
    barred = bars(len(samplings), left)
    tokens = drawn(samplings, logits, ForbiddenTokens(list(range(len(samplings))), barred))
    assert not any(barred[row, token] for row, token in enumerate(tokens))
    assert tokens == drawn(samplings, logits.masked_fill(barred, -torch.inf), None)


def test_rows_without_a_grammar_are_unaffected_by_other_rows_masks() -> None:
    samplings, logits = everything()
    bound = list(range(0, len(samplings), 3))
    barred = bars(len(bound), 4)
    free = drawn(samplings, logits, None)
    tokens = drawn(samplings, logits, ForbiddenTokens(bound, barred))
    for row in range(len(samplings)):
        if row in bound:
            assert not barred[bound.index(row), tokens[row]]
        else:
            assert tokens[row] == free[row]


def test_a_row_with_every_token_forbidden_affects_no_other_row() -> None:
    """Such is the row after the end of a text that a draft foresaw; nobody looks at its token."""
    samplings, logits = everything()
    empty = list(range(0, len(samplings), 3))
    all_of_them = torch.ones(len(empty), VOCAB, dtype=torch.bool)
    tokens = drawn(samplings, logits, ForbiddenTokens(empty, all_of_them))
    free = drawn(samplings, logits, None)
    for row, token in enumerate(tokens):
        assert 0 <= token < VOCAB if row in empty else token == free[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_ban_leaves_the_tokens_that_the_grammar_allows(temperature: float) -> None:
    """Where the grammar allows only what is banned, the grammar wins; else both hold."""
    s = options(min_tokens=9, stop_token_ids=(4,), temperature=temperature)
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS] = 50.0
    barred = torch.ones(3, VOCAB, dtype=torch.bool)
    for row, allowed in enumerate(([EOS], [EOS, 4], [EOS, 4, 9])):
        barred[row, allowed] = False
    tokens = drawn([s] * 3, logits, ForbiddenTokens([0, 1, 2], barred))
    assert tokens == [EOS, EOS, 9]


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_p": 0.9}])
def test_allowed_tokens_and_a_grammar_both_hold(changes: dict[str, Any]) -> None:
    """Where they share no token, the text may end if the grammar lets it; another row is free."""
    s = options(allowed_token_ids=(4, 9), **changes)
    logits = torch.zeros(4, VOCAB)
    logits[:, [EOS, 11]] = 50.0
    barred = torch.ones(3, VOCAB, dtype=torch.bool)
    for row, allowed in enumerate(([9, 11, EOS], [11, EOS], [EOS])):
        barred[row, allowed] = False
    tokens = drawn([s] * 4, logits, ForbiddenTokens([0, 1, 2], barred))
    assert tokens[:3] == [9, EOS, EOS] and tokens[3] in (4, 9)


def test_few_allowed_tokens_need_only_the_first_top_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that ends in what is barred holds all there is to draw."""
    sizes: list[int] = []
    inner = filters._sample_among_top

    def counted(*args: object) -> object:
        sizes.append(args[3][0])  # type: ignore[index]
        return inner(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(filters, "_sample_among_top", counted)
    samplings = [options(top_k=100), options(top_p=0.99), options(min_p=1e-9)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    drawn(samplings, logits, ForbiddenTokens([0, 1, 2], bars(3, 7)))
    assert sizes == [filters.TOP_COUNTS[0]]
    drawn(samplings, logits, None)
    assert len(sizes) > 2, "without a grammar they look further"
