"""What the engine's text is held to: a CPU model in fp32 that is fed the text (teacher-forced).

The contract: each emitted token's score is within epsilon of the reference's maximum. A score is
the logit, for a greedy row; logit / temperature + noise for one that draws without filters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batching.attention_metadata import AttentionMetadata, PackedBatch, chunk_attention
from engine.kv_cache.kv_format import Precision
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import DecoderModel
from engine.sampling.filters import gumbel_noise, noise_key
from engine.scheduling.sequence import blocks_for
from protocol.block_keys import BLOCK_TOKENS
from protocol.sampling_params import SamplingParams

EPSILON = {
    (torch.float32, "exact"): 1e-3,
    (torch.float32, "fp8"): 0.15,  # where a sum rounds otherwise, a value moves to the next step
    (torch.bfloat16, "exact"): 0.1,
    (torch.bfloat16, "fp8"): 0.3,
}
"""In standard deviations of the logits; a token drawn at random is some 3 of them off."""

ROUTED = 0.05
"""In bf16, share of tokens that may be off by more where experts are chosen: near a tie, another
expert computes the token."""


def assert_within(short: Tensor, dtype: torch.dtype, precision: Precision, routed: bool) -> None:
    """short: [tokens] shortfalls of whole texts; most must be none at all, and none large."""
    epsilon = EPSILON[dtype, precision]
    beyond = short[short > epsilon]
    if routed and dtype == torch.bfloat16:
        assert len(beyond) <= ROUTED * len(short), beyond
    else:
        assert not len(beyond), beyond
        assert short.mean() <= epsilon / 10, short


@torch.inference_mode()
def logits_of(
    model: DecoderModel, prompt: list[int], text: list[int], precision: Precision
) -> Tensor:
    """Logits [len(text), vocab] that each token of ``text`` was to be drawn from."""
    tokens = [*prompt, *text[:-1]]
    pages = blocks_for(len(tokens))
    format_ = model.config.kv_format(precision, "wide", model.dtype.itemsize)
    pool = make_pool(format_, pages, model.dtype, model.device)
    positions = torch.arange(len(tokens))
    like = torch.empty(0, dtype=model.dtype)
    views = {
        window: AttentionMetadata(
            0, (), (chunk_attention(torch.arange(pages), 0, 0, len(tokens), window, like),)
        )
        for window in set(model.config.windows)
    }
    assert pages * BLOCK_TOKENS >= len(tokens)
    batch = PackedBatch(torch.tensor(tokens), positions, positions, views, None)
    return model.forward(batch, pool)[len(prompt) - 1 :]


def shortfall(logits: Tensor, text: list[int], prompt: int, sampling: SamplingParams) -> Tensor:
    """By how much each token's score is below the best, in standard deviations of the logits:
    [len(text)]. ``prompt``: tokens before the text."""
    score, spread = logits.double(), logits.double().std(-1)
    if sampling.temperature > 0:
        keys = torch.full((len(text),), noise_key(sampling.seed, sampling.choice))
        positions = torch.arange(prompt, prompt + len(text))
        noise = gumbel_noise(keys, positions, torch.arange(logits.shape[1]))
        score, spread = score / sampling.temperature + noise, spread / sampling.temperature
    chosen = score.gather(1, torch.tensor(text)[:, None])[:, 0]
    return (score.max(-1).values - chosen) / spread
