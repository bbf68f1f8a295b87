"""On a GPU, the same tokens are drawn from the same logits, and reported alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.sampler import Sampler
from engine.sampling.sampling_metadata import DraftRows
from engine.structured_output.masks import (
    ForbiddenTokens,
    bitmask_words,
    forbidden_mask,
    mask_forbidden_,
)
from protocol.requests import Logprobs
from protocol.sampling_params import SamplingParams
from tests.engine.sampling_oracle import options, seated
from tests.engine.test_sampling_engine import KINDS

VOCAB = 20_000
PROMPT, OUTPUT = [5, 6, 7, 5], [7, 8, 8]
STEPS = 4


def drawn(
    device: str, samplings: list[SamplingParams]
) -> tuple[list[list[int]], list[Logprobs | None]]:
    """Tokens of some steps, [STEPS][R], and the last one's log-probabilities."""
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB, device)
    draw = Sampler(table)
    generator = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.5, 5, len(samplings))[:, None]
    steps, start = [], len(PROMPT) + len(OUTPUT)
    for position in range(start, start + STEPS):
        logits = torch.randn(len(samplings), VOCAB, generator=generator) * spread
        at = torch.full((len(samplings),), position, device=device)
        tokens, logprobs = draw(sequences, logits.to(device), rows, at).read()
        steps.append(tokens)
    return steps, logprobs


def every_kind() -> list[SamplingParams]:
    return [options(seed=i, **KINDS[i % len(KINDS)]) for i in range(4 * len(KINDS))]


def test_a_batch_of_every_kind_runs_for_many_steps() -> None:
    samplings = every_kind()
    together, logprobs = drawn("cpu", samplings)
    assert [entry is not None for entry in logprobs] == [s.logprobs is not None for s in samplings]
    assert len({token for step in together for token in step}) > len(samplings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_samples_the_same_tokens_as_cpu() -> None:
    tokens, logprobs = drawn("cuda", every_kind())
    wanted, reports = drawn("cpu", every_kind())
    assert tokens == wanted
    for ours, theirs in zip(logprobs, reports, strict=True):
        if ours is not None and theirs is not None:
            assert (ours.rank, ours.top_tokens) == (theirs.rank, theirs.top_tokens)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def verified(device: str, samplings: list[SamplingParams]) -> list[list[int]]:
    """Tokens of some steps with three drafts for each: [STEPS][4 * R]. All drafts are accepted."""
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB, device)
    draw, count = Sampler(table), len(samplings)
    generator = torch.Generator().manual_seed(4)
    owner, depth = torch.arange(count).repeat_interleave(4), torch.arange(4).repeat(count)
    steps = []
    for step in range(STEPS):
        drafts = torch.randint(0, 9, (count, 4), generator=generator)
        ancestors = torch.where(torch.arange(3) < depth[:, None], drafts[owner, :3], -1)
        nodes = DraftRows(
            *(owner.to(device), np.full(count, 4)), *(depth.to(device), ancestors.to(device))
        )
        logits = (torch.randn(4 * count, VOCAB, generator=generator) * 3).to(device)
        start = len(sequences[0].tokens)
        tokens, _ = draw.verify(sequences, logits, rows, start + nodes.depth, nodes).read()
        steps.append(tokens)
        at = torch.full((count,), start, device=device)
        taken = torch.full((count,), 3 + step % 2, device=device)
        drafts[:, 3] = drafts[:, 2] if step % 2 == 0 else drafts[:, 3]
        draw.append(sequences, rows, at, drafts.to(device), taken)
        for sequence, own in zip(sequences, drafts.tolist(), strict=True):
            sequence.tokens += own[: 3 + step % 2]
    return steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_verifies_the_same_tokens_as_cpu() -> None:
    assert verified("cuda", every_kind()) == verified("cpu", every_kind())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_masks_forbid_the_same_tokens_as_cpu() -> None:
    bits = torch.randint(-(2**31), 2**31, (7, bitmask_words(VOCAB)), dtype=torch.int32).numpy()
    barred = {d: forbidden_mask(bits, VOCAB, torch.device(d)) for d in ("cpu", "cuda")}
    assert torch.equal(barred["cuda"].cpu(), barred["cpu"])
    logits = torch.randn(9, VOCAB, device="cuda")
    wanted = logits.clone()
    at = [0, 2, 3, 4, 6, 7, 8]
    mask_forbidden_(logits, ForbiddenTokens(at, barred["cuda"]))
    for row, tokens in zip(at, barred["cuda"], strict=True):
        wanted[row, tokens] = -torch.inf
    assert torch.equal(logits, wanted)
