"""How often what the heads foretell is met, by depth and rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from engine.demo.training.corpus import Tokens
from engine.demo.training.heads_networks import (
    EagleHead,
    Keys,
    MedusaHeads,
    eagle_step,
    features,
    read,
)
from engine.demo.training.networks import Llama
from engine.execution.engine import Engine, EngineConfig
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.sampling.noise import gumbel_noise, noise_key
from engine.scheduling.sequence import blocks_for
from engine.scheduling.step_policy import StepState, chunks_in_order
from engine.speculation.drafts import ROOT
from engine.speculation.proposers.draft_tree import DraftTree, TreePrior, best_tree
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

# MERGED engine.demo.heads_text
# The target's own continuations: what heads meet in use, to train and to measure them on.

PROMPT = (32, 256)
"""Tokens of a prompt: any number between these."""
BATCH = 64


@dataclass(frozen=True)
class Continued:
    """Token sequences, each a prompt and the target's continuation of it."""

    texts: list[Tokens]
    prompts: list[int]  # leading tokens of each that are the prompt


def cut_prompts(docs: list[Tokens], count: int, seed: int) -> list[Tokens]:
    """Pieces of documents, from anywhere in all of them alike."""
    rng = np.random.default_rng(seed)
    stream = np.concatenate(docs)
    lengths = rng.integers(*PROMPT, size=count, endpoint=True)
    starts = rng.integers(len(stream) - PROMPT[1], size=count)
    return [stream[a : a + n] for a, n in zip(starts, lengths, strict=True)]


def continued(
    folder: Path, prompts: list[Tokens], temperatures: Sequence[float], tokens: int
) -> Continued:
    """Continue each prompt by ``tokens`` tokens (fewer where the text ends), at the temperatures in
    turn; prompt ``i`` with seed ``i``. ``folder``: of the target."""
    engine = _engine(folder, PROMPT[1] + tokens)
    texts = [prompt.tolist() for prompt in prompts]
    for i, prompt in enumerate(texts):
        sampling = SamplingParams(
            temperature=temperatures[i % len(temperatures)], seed=i, max_tokens=tokens
        )
        engine.generate(i, Request(id=f"{i}", prompt=tuple(prompt), sampling=sampling))
    while plan := engine.plan():
        for out in engine.run(plan):
            texts[out.handle].append(out.token)
    return Continued([np.array(t, dtype=np.int64) for t in texts], [len(p) for p in prompts])


def _engine(folder: Path, length: int) -> Engine:
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    pages = BATCH * (blocks_for(length) + 1)
    sizes = EngineConfig(
        pages=pages,
        max_batch=BATCH,
        max_model_len=length,
        prefill_chunk=512,
        step_budget_ms=None,
        kv_precision="exact",
        kv_storage="wide",
    )
    return Engine(DecoderModel(config, weights, length), sizes, _prompts_first)


def _prompts_first(state: StepState) -> list[int]:
    return chunks_in_order(state.remaining, state.chunk)


RANKS = 8
DEPTHS = 4

Foretell: TypeAlias = Callable[[Tensor, int], list[Tensor]]
"""From ids [length] and the first position that is known, by depth d: logits [n, vocab] for the
tokens at first + 1 + d and after."""


def medusa_foretells(heads: MedusaHeads, target: Llama) -> Foretell:
    def foretell(ids: Tensor, first: int) -> list[Tensor]:
        seen = features(target, ids[None])[0, first - 1 :]
        return [head(seen[: len(seen) - 2 - d]) for d, head in enumerate(heads)]

    return foretell


def eagle_foretells(head: EagleHead, target: Llama) -> Foretell:
    def foretell(ids: Tensor, first: int) -> list[Tensor]:
        before = features(target, ids[None])[:, first - 1 : -2]
        embedded = target.model.embed_tokens(ids[None, first:-1])
        length = before.shape[1]
        cos, sin = target.cos[:length], target.sin[:length]
        keys, known, out = Keys(), before, []
        for depth in range(DEPTHS):
            made = eagle_step(head, keys, head.join(embedded, known), cos, sin)
            out.append(read(target, made[0, depth:]))
            known = torch.cat((before[:, :1], made[:, :-1]), 1)
        return out

    return foretell


def draft_foretells(draft: Llama) -> Foretell:
    def foretell(ids: Tensor, first: int) -> list[Tensor]:
        logits = draft(ids[None])[0, first:-1]
        return [logits[depth:] for depth in range(DEPTHS)]

    return foretell


def foretells(head: nn.Module, target: Llama) -> Foretell:
    if isinstance(head, MedusaHeads):
        return medusa_foretells(head, target)
    assert isinstance(head, EagleHead)
    return eagle_foretells(head, target)


@torch.no_grad()
def met_ranks(foretell: Foretell, texts: Continued, temperature: float) -> Tensor:
    """The rank that each token of the continuations had, by depth: [depths, n]. A column is one
    place of a text: how its next tokens stood, each foretold with those before it."""
    columns = []
    for i, (text, prompt) in enumerate(zip(texts.texts, texts.prompts, strict=True)):
        if len(text) < prompt + DEPTHS + 2:
            continue
        ids = torch.from_numpy(text)
        by_depth = foretell(ids, prompt)
        count = min(len(logits) for logits in by_depth)
        rows = [
            _ranks(logits[:count], ids[prompt + 1 + d :][:count], prompt + 1 + d, i, temperature)
            for d, logits in enumerate(by_depth)
        ]
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1)


def _ranks(logits: Tensor, tokens: Tensor, first: int, seed: int, temperature: float) -> Tensor:
    """Of ``tokens`` [n], at positions from ``first`` on, among the scores of all: [n]."""
    scores = logits.double()
    if temperature:
        keys = torch.full((len(tokens),), noise_key(seed, 0))
        noise = gumbel_noise(keys, torch.arange(len(tokens)) + first, torch.arange(logits.shape[1]))
        scores = scores / temperature + noise
    return (scores > scores.gather(1, tokens[:, None])).sum(-1)


@torch.no_grad()
def agreement(foretell: Foretell, target: Llama, docs: list[Tokens], length: int) -> list[float]:
    """How often the first rank is the target's own, by depth, on given texts."""
    hits: list[list[float]] = []
    for doc in docs:
        ids = torch.from_numpy(doc[:length])
        own = read(target, features(target, ids[None])[0]).argmax(-1)
        row = [
            (logits.argmax(-1) == own[1 + d :][: len(logits)]).float().mean().item()
            for d, logits in enumerate(foretell(ids, 1))
        ]
        hits.append(row)
    return [float(np.mean(column)) for column in zip(*hits, strict=True)]


def prior_of(ranks: Tensor, *, spine_only: bool) -> TreePrior:
    """How often each rank was met where the path before was, from ``met_ranks``."""
    alive = torch.ones_like(ranks[0], dtype=torch.bool)
    prior = []
    for row in ranks:
        left = max(1, int(alive.sum()))
        found = [float((row[alive] == rank).sum()) / left for rank in range(RANKS)]
        prior.append([round(chance, 4) for chance in found])
        alive &= row < (1 if spine_only else RANKS)
    return prior


def tokens_per_step(ranks: Tensor, tree: DraftTree) -> float:
    """Mean length of what a step says with this tree, the draw of its own included."""
    nodes = {(p, d, r): i for i, (d, r, p) in enumerate(_nodes(tree))}
    total = 0
    for column in ranks.t().tolist():
        at, depth = ROOT, 0
        while depth < len(column) and (at, depth, column[depth]) in nodes:
            at = nodes[at, depth, column[depth]]
            depth += 1
        total += 1 + depth
    return total / max(1, ranks.shape[1])


def _nodes(tree: DraftTree) -> Sequence[tuple[int, int, int]]:
    return list(zip(tree.depths, tree.ranks, tree.parents, strict=True))


@dataclass(frozen=True)
class Measured:
    """Of one proposer on the target's own continuations of held-out pieces."""

    temperature: float
    chain: list[float]  # by depth: how often the first rank is met where those before were
    second: float  # how often rank 1 is met at the first depth
    per_step: dict[int, float]  # tokens of a step, by nodes of the tree


def measure(ranks: Tensor, prior: TreePrior, temperature: float, *, spine_only: bool) -> Measured:
    """From ``met_ranks``; the trees are those of the prior."""
    return Measured(
        temperature,
        [row[0] for row in prior_of(ranks, spine_only=True)],
        prior_of(ranks, spine_only=True)[0][1],
        {
            n: tokens_per_step(ranks, best_tree(prior, n, spine_only=spine_only))
            for n in (1, 2, 4, 8)
        },
    )
