"""Each change to the logits against transformers' processor, where there is one for it, and against
the reference written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling.filters import filter_threshold
from engine.sampling.sampler import apply_logits_processors_
from protocol.sampling_params import SamplingParams
from tests.engine.sampling_oracle import options, processed, selected

VOCAB = 500
PROMPT = [5, 6, 7, 5, 30, 499]
OUTPUT = [7, 8, 8, 8, 0]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 3


def ours(samplings: list[SamplingParams], rows: torch.Tensor, output: list[int]) -> torch.Tensor:
    out = rows.clone()
    chosen, table = selected(samplings, PROMPT, output, VOCAB)
    length = len(PROMPT) + len(output)
    apply_logits_processors_(out, chosen, torch.full((len(rows),), length), table.history, length)
    return out


@pytest.mark.parametrize("penalty", [0.3, 0.9, 1.1, 10.0])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    rows = logits(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([PROMPT + OUTPUT]), rows.clone()
    )
    assert torch.equal(ours([options(repetition_penalty=penalty)], rows, OUTPUT), theirs)


@pytest.mark.parametrize(
    ("changes", "warper"),
    [
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_k": 40}, TopKLogitsWarper(40)),
        ({"top_k": 499}, TopKLogitsWarper(499)),
        ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
        ({"top_p": 0.5}, TopPLogitsWarper(0.5)),
        ({"top_p": 0.97}, TopPLogitsWarper(0.97)),
        ({"min_p": 0.004}, MinPLogitsWarper(0.004)),
        ({"min_p": 0.4}, MinPLogitsWarper(0.4)),
        ({"min_p": 1.0}, MinPLogitsWarper(1.0)),
    ],
)
def test_filters_match_transformers(changes: dict[str, Any], warper: Any) -> None:
    rows = logits(50, seed=1)
    chosen, _ = selected([options(**changes)] * 50, PROMPT, OUTPUT, VOCAB)
    (draws,) = chosen.random
    assert draws.filters is not None
    ordered = rows.sort(dim=-1, descending=True).values
    allowed = rows >= filter_threshold(rows, ordered, draws.filters)
    theirs = warper(torch.tensor([PROMPT + OUTPUT] * 50), rows.clone()) > float("-inf")
    assert torch.equal(allowed, theirs)


MIXED = [
    options(),
    options(presence_penalty=1.5),
    options(frequency_penalty=-2.0),
    options(repetition_penalty=1.7, presence_penalty=-0.3, frequency_penalty=0.8),
    options(logit_bias=((0, 4.0), (8, -100.0), (499, 2.5))),
    options(logit_bias=((8, 3.0),), frequency_penalty=0.5, repetition_penalty=1.2),
    options(min_tokens=6, stop_token_ids=(8, 11)),
    options(min_tokens=6, stop_token_ids=(8,), ignore_eos=True),
    options(min_tokens=6, ignore_eos=True),
    options(min_tokens=5, stop_token_ids=(8,)),
    options(temperature=0.0, logit_bias=tuple((t, t / 11 - 40) for t in range(400))),
]


@pytest.mark.parametrize("output", [OUTPUT, []])
def test_a_mixed_batch_matches_the_oracle(output: list[int]) -> None:
    rows = logits(len(MIXED), seed=2)
    changed = ours(MIXED, rows, output)
    for row, after, s in zip(rows, changed, MIXED, strict=True):
        wanted = torch.tensor(processed(row.tolist(), s, PROMPT, output))
        torch.testing.assert_close(after.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(changed[0], rows[0])


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = logits(len(MIXED), seed=3)
    together = ours(MIXED, rows, OUTPUT)
    for i, s in enumerate(MIXED):
        assert torch.equal(ours([s], rows[i : i + 1], OUTPUT)[0], together[i])
