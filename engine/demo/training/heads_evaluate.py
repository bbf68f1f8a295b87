"""Measurement of heads and of the demo draft on text that the target generated.

``generate_continuations`` makes that text, which ``train_heads`` also trains on. All measurements
rest on the rank of the target's token among the draft scores of each depth: the acceptance rates by
depth, the tree prior of an exported head, and the tokens per step of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from engine.demo.training.corpus import Tokens
from engine.demo.training.heads_networks import (
    TrainableEagleHead,
    TrainableMedusaHeads,
    UnrolledAttention,
    eagle_step,
)
from engine.demo.training.networks import Llama
from engine.execution.engine import Engine, EngineConfig
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.sampling.filters import gumbel_noise, noise_key
from engine.scheduling.sequence import blocks_for
from engine.scheduling.step_policy import StepState, chunks_in_order
from engine.speculation.drafts import ROOT
from engine.speculation.proposers.draft_tree import DraftTree, TreePrior, best_tree
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

PROMPT_TOKENS = (32, 256)  # smallest and largest prompt length
BATCH = 64
RANKS = 8
DEPTHS = 4

DraftLogits: TypeAlias = Callable[[Tensor, int], list[Tensor]]
"""Function from ids [length] and the first position known to the drafter to logits by depth.

Depth d returns logits [n, vocab] for the tokens at positions first + 1 + d and after.
"""


@dataclass(frozen=True)
class Continuations:
    """Token sequences, each a prompt and the target's continuation of it."""

    texts: list[Tokens]
    prompts: list[int]  # number of leading tokens of each text that are its prompt


def sample_prompts(docs: list[Tokens], count: int, seed: int) -> list[Tokens]:
    """Cut ``count`` prompts from uniformly random places of the joined documents."""
    rng = np.random.default_rng(seed)
    stream = np.concatenate(docs)
    lengths = rng.integers(*PROMPT_TOKENS, size=count, endpoint=True)
    starts = rng.integers(len(stream) - PROMPT_TOKENS[1], size=count)
    return [stream[a : a + n] for a, n in zip(starts, lengths, strict=True)]


def generate_continuations(
    folder: Path, prompts: list[Tokens], temperatures: Sequence[float], tokens: int
) -> Continuations:
    """Continue each prompt by ``tokens`` tokens, or fewer if the target ends the text.

    The target is loaded from ``folder``. Prompt ``i`` is sampled with seed ``i``, and with the
    temperatures in rotation.
    """
    engine = _engine(folder, PROMPT_TOKENS[1] + tokens)
    texts = [prompt.tolist() for prompt in prompts]
    for i, prompt in enumerate(texts):
        sampling = SamplingParams(
            temperature=temperatures[i % len(temperatures)], seed=i, max_tokens=tokens
        )
        engine.generate(i, Request(id=f"{i}", prompt=tuple(prompt), sampling=sampling))
    while plan := engine.plan():
        for out in engine.run(plan):
            texts[out.handle].append(out.token)
    return Continuations([np.array(t, dtype=np.int64) for t in texts], [len(p) for p in prompts])


def _engine(folder: Path, length: int) -> Engine:
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    sizes = EngineConfig(
        pages=BATCH * (blocks_for(length) + 1),
        max_batch=BATCH,
        max_model_len=length,
        prefill_chunk=512,
        step_budget_ms=None,
        ttft_slo_s=None,
        tpot_slo_s=None,
        kv_precision="exact",
        batch_invariant=False,
        kv_storage="wide",
    )

    def schedule(state: StepState) -> list[int]:
        return chunks_in_order(state.remaining, state.chunk)

    return Engine(DecoderModel(config, weights, length), sizes, schedule)


def head_logits(head: nn.Module, target: Llama) -> DraftLogits:
    """Return the draft logits of a Medusa or EAGLE head."""
    if isinstance(head, TrainableMedusaHeads):
        return partial(_medusa_logits, head, target)
    assert isinstance(head, TrainableEagleHead)
    return partial(_eagle_logits, head, target)


def _medusa_logits(
    heads: TrainableMedusaHeads, target: Llama, ids: Tensor, first: int
) -> list[Tensor]:
    features = target.features(ids[None])[0, first - 1 :]
    return [head(features[: len(features) - 2 - d]) for d, head in enumerate(heads)]


def _eagle_logits(head: TrainableEagleHead, target: Llama, ids: Tensor, first: int) -> list[Tensor]:
    before = target.features(ids[None])[:, first - 1 : -2]
    embedded = target.model.embed_tokens(ids[None, first:-1])
    length = before.shape[1]
    cos, sin = target.cos[:length], target.sin[:length]
    attention, known, out = UnrolledAttention(), before, []
    for depth in range(DEPTHS):
        predicted = eagle_step(head, attention, head.join(embedded, known), cos, sin)
        out.append(target.logits(predicted[0, depth:]))
        known = torch.cat((before[:, :1], predicted[:, :-1]), 1)
    return out


def draft_model_logits(draft: Llama, ids: Tensor, first: int) -> list[Tensor]:
    """Return the draft logits [n, vocab] of a draft model by depth; ids: [length]."""
    logits = draft(ids[None])[0, first:-1]
    return [logits[depth:] for depth in range(DEPTHS)]


@torch.no_grad()
def target_token_ranks(
    draft_logits: DraftLogits, texts: Continuations, temperature: float
) -> Tensor:
    """Return the rank of each continuation token among the draft's scores: [depths, n].

    A column stands for one position: row d is the rank of the token d + 1 further on, where drafts
    of lower depth were the target's tokens. Texts too short for all depths are skipped. Scores
    contain the noise that the target sampled with, so a draft of rank 0 is accepted.
    """
    columns = []
    for i, (text, prompt) in enumerate(zip(texts.texts, texts.prompts, strict=True)):
        if len(text) < prompt + DEPTHS + 2:
            continue
        ids = torch.from_numpy(text)
        by_depth = draft_logits(ids, prompt)
        count = min(len(logits) for logits in by_depth)
        rows = [
            _ranks(logits[:count], ids[prompt + 1 + d :][:count], prompt + 1 + d, i, temperature)
            for d, logits in enumerate(by_depth)
        ]
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1)


def _ranks(logits: Tensor, tokens: Tensor, first: int, seed: int, temperature: float) -> Tensor:
    """Return the ranks [n] of tokens [n], from position ``first``, in logits [n, vocab]."""
    scores = logits.double()
    if temperature:
        keys = torch.full((len(tokens),), noise_key(seed, 0))
        noise = gumbel_noise(keys, torch.arange(len(tokens)) + first, torch.arange(logits.shape[1]))
        scores = scores / temperature + noise
    return (scores > scores.gather(1, tokens[:, None])).sum(-1)


@torch.no_grad()
def greedy_agreement(
    draft_logits: DraftLogits, target: Llama, docs: list[Tokens], length: int
) -> list[float]:
    """Return by depth how often draft and target have the same most likely token on the texts.

    The first ``length`` tokens of each document are used.
    """
    rates: list[list[float]] = []
    for doc in docs:
        ids = torch.from_numpy(doc[:length])
        expected = target(ids[None])[0].argmax(-1)
        row = [
            (logits.argmax(-1) == expected[1 + d :][: len(logits)]).float().mean().item()
            for d, logits in enumerate(draft_logits(ids, 1))
        ]
        rates.append(row)
    return [float(np.mean(column)) for column in zip(*rates, strict=True)]


def estimate_tree_prior(ranks: Tensor, *, spine_only: bool) -> TreePrior:
    """Return by depth how often each rank was the target's token, from ranks [depths, n].

    A depth counts only the positions whose tokens at the depths before were within the tree.
    """
    alive = torch.ones_like(ranks[0], dtype=torch.bool)
    prior = []
    for row in ranks:
        left = max(1, int(alive.sum()))
        rates = [float((row[alive] == rank).sum()) / left for rank in range(RANKS)]
        prior.append([round(rate, 4) for rate in rates])
        alive &= row < (1 if spine_only else RANKS)
    return prior


def tokens_per_step(ranks: Tensor, tree: DraftTree) -> float:
    """Return the mean tokens of a verification step with this tree, from ranks [depths, n].

    The token that the target samples after the accepted drafts is included.
    """
    shape = zip(tree.depths, tree.ranks, tree.parents, strict=True)
    nodes = {(parent, depth, rank): i for i, (depth, rank, parent) in enumerate(shape)}
    total = 0
    for column in ranks.t().tolist():
        at, depth = ROOT, 0
        while depth < len(column) and (at, depth, column[depth]) in nodes:
            at = nodes[at, depth, column[depth]]
            depth += 1
        total += 1 + depth
    return total / max(1, ranks.shape[1])


@dataclass(frozen=True)
class DraftMeasurement:
    """Acceptance of one proposer on the target's continuations of held-out pieces."""

    temperature: float
    chain: list[float]  # by depth: acceptance rate of rank 0 if the depths before were accepted
    second: float  # how often rank 1 is the target's token at the first depth
    per_step: dict[int, float]  # tokens per step, by number of tree nodes


def measure_draft(
    ranks: Tensor, prior: TreePrior, temperature: float, *, spine_only: bool
) -> DraftMeasurement:
    """Summarize ranks [depths, n]; the trees are built from ``prior``."""
    spine = estimate_tree_prior(ranks, spine_only=True)
    per_step = {
        n: tokens_per_step(ranks, best_tree(prior, n, spine_only=spine_only)) for n in (1, 2, 4, 8)
    }
    return DraftMeasurement(temperature, [row[0] for row in spine], spine[0][1], per_step)
