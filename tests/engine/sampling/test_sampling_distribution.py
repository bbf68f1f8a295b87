"""What is drawn follows the target's distribution: chi-square over 50,000 draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling import filters
from engine.sampling.filters import NoiseRows, gumbel_noise, noise_key, sample_unfiltered
from engine.sampling.sampler import apply_logits_processors_, sample_tokens
from tests.engine.sampling_oracle import EOS, options, p_value, processed, selected, target

DRAWS = 50_000
AT_ONCE = 1_000
BIAS = tuple((token, token / 10 - 4.5) for token in range(40, 60))
PROMPT, OUTPUT = [5, 6, 7, 5, 30], [7, 58, 49, 58, 61]
ALL: dict[str, Any] = {
    **{"temperature": 0.8, "top_p": 0.9, "top_k": 25, "min_p": 0.02, "logit_bias": BIAS},
    **{"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    **{"min_tokens": 10, "stop_token_ids": (25, 11)},
}


def frequencies(row: torch.Tensor, **changes: Any) -> np.ndarray[Any, Any]:
    """How often each token is drawn from logits [vocab], by the choices of one request at many
    positions."""
    samplings = [options(seed=1, choice=i, **changes) for i in range(AT_ONCE)]
    chosen, table = selected(samplings, PROMPT, OUTPUT, len(row))
    counts = torch.zeros(len(row), dtype=torch.int64)
    logits = row.repeat(AT_ONCE, 1)
    start = len(PROMPT) + len(OUTPUT)
    apply_logits_processors_(logits, chosen, torch.full((AT_ONCE,), start), table.history, start)
    for position in range(start, start + DRAWS // AT_ONCE):
        draw = sample_tokens(logits, chosen, torch.full((AT_ONCE,), position))
        counts += torch.bincount(torch.tensor(draw.read()), minlength=len(row))
    return counts.double().numpy()


def logits(vocab: int, spread: float) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * spread


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 10},
        {"min_p": 0.1},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -0.7},
        {"logit_bias": BIAS},
        {"min_tokens": 9, "stop_token_ids": (58,)},
        ALL,
    ],
    ids=lambda changes: "+".join(changes) if len(changes) < 3 else "all",
)
def test_sampled_tokens_follow_the_target_distribution(changes: dict[str, Any]) -> None:
    row = logits(70, 1.5)
    s = options(**changes)
    wanted = target(processed(row.tolist(), s, PROMPT, OUTPUT), s)
    counts = frequencies(row, **changes)
    assert counts.sum() == DRAWS
    assert not counts[wanted == 0].any(), "a token was drawn that is not allowed"
    assert p_value(counts, wanted) > 1e-3


def test_a_wrong_distribution_fails_the_chi_square_test() -> None:
    row = logits(70, 1.5)
    counts = frequencies(row, **ALL)
    for field in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        near = {field: ALL[field] + 0.1}
        s = options(**{**ALL, **near})
        wanted = target(processed(row.tolist(), s, PROMPT, OUTPUT), s)
        assert counts[wanted == 0].any() or p_value(counts, wanted) < 1e-6


def test_end_tokens_are_allowed_again_after_min_tokens() -> None:
    """Of 5 output tokens, 6 were too few and 5 are enough."""
    row = logits(70, 1.5)
    row[EOS] = 9.0
    assert frequencies(row, min_tokens=6)[EOS] == 0
    assert frequencies(row, min_tokens=6, ignore_eos=True)[EOS] > 0.9 * DRAWS
    assert frequencies(row, min_tokens=5)[EOS] > 0.9 * DRAWS


def mixed_rows(count: int, vocab: int) -> tuple[torch.Tensor, NoiseRows, filters.FilterRows]:
    """Rows from peaked to flat, many of them with tied logits, and filters that end anywhere."""
    generator = torch.Generator().manual_seed(9)
    spread = torch.linspace(0.1, 6, count)[:, None]
    rows = torch.randn(count, vocab, generator=generator) * spread
    rows[::2] = rows[::2].bfloat16().float()  # ties
    uniform = torch.rand(3, count, generator=generator)
    top_k = (uniform[0] * 2 * vocab).long().clamp_(1, vocab)
    top_k[1::3] = vocab  # every third row: top_p alone, or with min_p
    top_p = (uniform[1] * 1.3).clamp_(0.01, 1.0)
    min_p = (uniform[2] - 0.5).clamp_(min=0.0) * 0.1
    noise = NoiseRows(
        0.5 + torch.rand(count, generator=generator), torch.arange(count) * 77, torch.arange(count)
    )
    return rows, noise, filters.FilterRows(top_p, top_k, min_p, True, True)


def filtered_tokens(
    rows: torch.Tensor, noise: NoiseRows, chosen: filters.FilterRows
) -> torch.Tensor:
    draw = filters.FilteredDraw(rows, noise, chosen)
    if draw.short is not None:
        draw.search_further(draw.short.nonzero()[:, 0].tolist())
    return draw.tokens


@pytest.mark.parametrize("heads", [(1,), (8, 64), (256,), (699,), filters.TOP_COUNTS])
def test_filtered_tokens_do_not_depend_on_the_top_counts(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, ...]
) -> None:
    rows, noise, chosen = mixed_rows(400, 700)
    monkeypatch.setattr(filters, "TOP_COUNTS", ())
    whole = filtered_tokens(rows, noise, chosen)
    monkeypatch.setattr(filters, "TOP_COUNTS", heads)
    assert torch.equal(filtered_tokens(rows, noise, chosen), whole)
    assert 20 < (whole != sample_unfiltered(rows, noise)).sum() < 380, (
        "filters matter in some rows only"
    )


def test_sampling_in_tiles_equals_sampling_the_whole_row() -> None:
    count, vocab = 5, 100_000
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, vocab, generator=generator) * torch.arange(1, 6)[:, None]
    noise = NoiseRows(torch.linspace(0.3, 2, count), torch.arange(count), torch.arange(count))
    scaled = rows / noise.temperature[:, None]
    whole = scaled + gumbel_noise(noise.keys, noise.positions, torch.arange(vocab))
    together = sample_unfiltered(rows, noise)
    assert torch.equal(together, whole.argmax(dim=-1))
    for i in range(count):
        one = torch.tensor([i])
        assert torch.equal(sample_unfiltered(rows[one], noise.select(one)), together[one])


def test_filter_threshold_matches_the_reference() -> None:
    rows, noise, chosen = mixed_rows(60, 300)
    scaled = rows / noise.temperature[:, None]
    ordered = scaled.sort(dim=-1, descending=True).values
    allowed = scaled >= filters.filter_threshold(scaled, ordered, chosen)
    for i, row in enumerate(rows):
        s = options(
            temperature=float(noise.temperature[i]),
            top_p=float(chosen.top_p[i]),
            top_k=int(chosen.top_k[i]),
            min_p=float(chosen.min_p[i]),
        )
        wanted = target(row.double().numpy(), s) > 0
        ties = np.isin(row.numpy(), row.numpy()[wanted])  # with the last one allowed
        assert np.array_equal(allowed[i].numpy(), ties), i


def test_tokens_of_a_seed_never_change() -> None:
    """Numbers of the first version: a changed generator would change every seeded text."""
    keys = [5197578548964807871, -5387752876907722278]
    assert [noise_key(0, 0), noise_key(2**62, 3)] == keys
    noise = gumbel_noise(torch.tensor(keys), torch.tensor([0, 1000]), torch.arange(3))
    wanted = [
        [-0.5542282567109341, 0.2900799971528893, 0.8565126124628356],
        [0.38959150411645505, -0.8345727554755614, 1.5137346438172077],
    ]
    torch.testing.assert_close(noise, torch.tensor(wanted, dtype=torch.float64))
    row = (torch.arange(320) * 0.37).sin()[None].repeat(8, 1) * 2
    seeds = torch.tensor([noise_key(seed, 0) for seed in range(8)])
    rows = NoiseRows(torch.full((8,), 0.8), seeds, torch.arange(8) + 5)
    assert sample_unfiltered(row, rows).tolist() == [174, 209, 38, 37, 259, 227, 278, 141]
    half = filters.FilterRows(
        torch.full((8,), 0.5), torch.full((8,), 320), torch.zeros(8), True, True
    )
    expected = [174, 209, 38, 173, 259, 310, 275, 141]
    assert filtered_tokens(row, rows, half).tolist() == expected
