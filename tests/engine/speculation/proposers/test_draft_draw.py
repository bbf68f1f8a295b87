"""What a draft draws is what the target would, from the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Phase, Sequence
from engine.speculation.proposers.draft_sampler import TOP_TOKENS, DraftSampler
from tests.engine.conftest import request

VOCAB = 320
KINDS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.02, "top_p": 0.8, "top_k": 40},
]
MIXES = [KINDS, KINDS[:2], KINDS[:3], KINDS[4:6], KINDS[2:3]]


def _seated(kinds: list[dict[str, Any]]) -> tuple[SamplingTable, list[Sequence], torch.Tensor]:
    table = SamplingTable(8, 64, VOCAB, (2,), torch.device("cpu"))
    sequences = []
    for i, kind in enumerate(kinds):
        sequence = Sequence(i, request(f"r{i}", [5, 6, 7], seed=i, **kind), Phase.DECODE)
        sequence.take_row(len(kinds) - 1 - i, i + 1)
        table.set_row(sequence)
        sequences.append(sequence)
    return table, sequences, torch.tensor([s.row for s in sequences])


@pytest.mark.parametrize("kinds", MIXES, ids=range(len(MIXES)))
def test_drafts_are_drawn_with_the_target_noise(kinds: list[dict[str, Any]]) -> None:
    table, sequences, rows = _seated(kinds)
    draws, target = DraftSampler(sequences, rows, table), Sampler(table)
    generator = torch.Generator().manual_seed(4)
    for place in range(40):
        # So uneven that what is left out of the head is never drawn.
        logits = torch.randn(len(kinds), VOCAB, generator=generator) * 8
        positions = torch.arange(len(kinds)) + place
        drawn = draws.draw(logits.clone(), positions)
        ranked = draws.ranked(logits.clone(), positions, 4)
        expected, _ = target(sequences, logits, rows, positions).read()
        assert drawn.tolist() == expected
        assert ranked[:, 0].tolist() == expected
        assert all(len(set(tokens)) == 4 for tokens in ranked.tolist())


def test_sampler_draws_for_the_first_sequences() -> None:
    table, sequences, rows = _seated(KINDS)
    draws = DraftSampler(sequences, rows, table)
    logits = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(len(KINDS))
    every = draws.draw(logits.clone(), positions).tolist()
    for count in range(1, len(KINDS)):
        assert draws.draw(logits[:count].clone(), positions[:count]).tolist() == every[:count]


def test_filters_apply_within_the_top_tokens() -> None:
    """Flat logits: nothing ends within the head, and still only its tokens are drawn."""
    table, sequences, rows = _seated(KINDS)
    logits = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(2)) * 0.01
    drawn = DraftSampler(sequences, rows, table).draw(logits.clone(), torch.arange(len(KINDS)))
    head = logits.topk(TOP_TOKENS).indices
    assert (head == drawn[:, None]).any(dim=1).all()
    assert drawn[:2].tolist() == logits[:2].argmax(dim=1).tolist()
