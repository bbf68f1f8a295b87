"""A verification draws for every row what the plain path draws for a sequence of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling.penalties import PenaltyRows, TokenHistory
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_metadata import DraftRows
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Phase
from engine.scheduling.sequence import Sequence as Running
from protocol.requests import Request
from tests.engine.drafted import VOCAB, Case, VerifiedBatch, cases, draw_without_drafts
from tests.engine.sampling_oracle import EOS, options, p_value, target


@given(st.lists(cases(), min_size=1, max_size=5), st.lists(st.booleans(), min_size=3, max_size=3))
def test_every_verified_row_draws_the_token_of_plain_decoding(
    some: list[Case], plain: list[bool]
) -> None:
    """Over steps with drafts and without, bit for bit."""
    verified = VerifiedBatch(some)
    for index, between in enumerate(plain):
        if between:
            verified.plain()
        rows = verified.step([case.steps[index] for case in some])
        owner = [i for i, case in enumerate(some) for _ in range(1 + len(case.steps[index]))]
        for i, output, token, report in zip(owner, *rows, strict=True):
            assert (token, report) == draw_without_drafts(some[i], output)
    for i, case in enumerate(some):
        text = verified.output(i)
        for end in range(len(text)):
            assert draw_without_drafts(case, text[:end])[0] == text[end], "text is the plain path's"
    check_history(verified)


def check_history(verified: VerifiedBatch) -> None:
    """Rows of penalised sequences hold their tokens, and nothing else."""
    history = verified.table.history
    for i, sequence in enumerate(verified.sequences):
        if sequence.request.sampling.has_penalties:
            assert history is not None
            row = history.tokens[sequence.row].tolist()
            assert row[: len(sequence.tokens)] == sequence.tokens
            assert set(row) == set(sequence.tokens)
            counts = np.bincount(verified.output(i), minlength=VOCAB)
            assert history.counts[sequence.row].tolist() == counts.tolist()


def test_token_history_is_padded_within_its_length() -> None:
    """What is appended is padded to the longest of the step, not beyond."""
    history = TokenHistory(2, 6, VOCAB, torch.device("cpu"))
    for row in range(2):
        history.set_row(row, [5, 6, 7][: 2 + row], 2)
    rows = PenaltyRows(torch.tensor([0, 1]), np.arange(2), torch.tensor([1, 0]), *torch.ones(3, 2))
    tokens, counts = torch.tensor([[8, 8, 9, 9], [7, 8, 8, 7]]), torch.tensor([3, 4])
    history.extend(rows, torch.tensor([3, 2]), tokens, counts)
    assert history.tokens.tolist() == [[5, 6, 7, 8, 8, 7], [5, 6, 7, 8, 8, 9]]
    assert history.counts[:, [5, 6, 7, 8, 9]].tolist() == [[0, 0, 2, 2, 0], [0, 0, 1, 2, 1]]


# ---- distribution -----------------------------------------------------------------------------

STREAMS = 1_000
ROUNDS = 20
SMALL = 8


def chain_logits() -> Tensor:
    """After each token: [SMALL, SMALL]."""
    return torch.randn(SMALL, SMALL, generator=torch.Generator().manual_seed(5)) * 0.8


class Chains:
    """Texts of a model that looks at the last token only, made by verifying random drafts."""

    def __init__(self, changes: dict[str, Any]) -> None:
        table = SamplingTable(STREAMS, 1, SMALL, (EOS,), torch.device("cpu"))
        self.draw = Sampler(table)
        self.sequences = []
        for i in range(STREAMS):
            sampling = options(seed=1, choice=i, **changes)
            request = Request(id=str(i), prompt=(0,), sampling=sampling)
            self.sequences.append(Running(i, request, Phase.DECODE))
            self.sequences[-1].take_row(i, i + 1)
            table.set_row(self.sequences[-1])
        self.rows = torch.arange(STREAMS)
        self.known = torch.ones(STREAMS, dtype=torch.int64)
        self.last = torch.zeros(STREAMS, dtype=torch.int64)
        self.follows = torch.zeros(SMALL, SMALL, dtype=torch.int64)

    def step(self, drafts: Tensor) -> None:
        """drafts: [STREAMS, 3]"""
        owner = self.rows.repeat_interleave(4)
        depth = torch.arange(4).repeat(STREAMS)
        ancestors = torch.where(torch.arange(3) < depth[:, None], drafts[owner], -1)
        before = torch.cat([self.last[:, None], drafts], dim=1)
        drawn = self.draw.verify(
            self.sequences,
            chain_logits()[before.flatten()],
            self.rows,
            self.known[owner] + depth,
            DraftRows(owner, np.full(STREAMS, 4), depth, ancestors),
        )
        drawn.read()
        own = drawn.tokens.view(STREAMS, 4)
        counts = 1 + (own[:, :3] == drafts).int().cumprod(dim=1).sum(dim=1)
        for d in range(4):
            on = counts > d
            pairs = before[on, d] * SMALL + own[on, d]
            self.follows += torch.bincount(pairs, minlength=SMALL**2).view(SMALL, SMALL)
        self.known += counts
        self.last = own.gather(1, (counts - 1)[:, None])[:, 0]


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.3, "top_p": 0.9}])
def test_text_verified_from_random_drafts_follows_the_model(changes: dict[str, Any]) -> None:
    chains, random = Chains(changes), torch.Generator().manual_seed(6)
    for _ in range(ROUNDS):
        chains.step(torch.randint(0, SMALL, (STREAMS, 3), generator=random))
    wanted = [target(row.numpy(), options(**changes)) for row in chain_logits().double()]
    for token, row in enumerate(chains.follows.double().numpy()):
        assert row.sum() > 300
        assert not row[wanted[token] == 0].any()
        assert p_value(row, wanted[token]) > 1e-3
        other = wanted[token - 1]
        assert row[other == 0].any() or p_value(row, other) < 1e-6, "the test would notice"
