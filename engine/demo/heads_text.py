"""The target's own continuations: what heads meet in use, to train and to measure them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint import load_config
from engine.core import Engine, EngineConfig
from engine.demo.tokenizer import Tokens
from engine.model import Model
from engine.policy import StepState, fill_in_order
from engine.sequence import blocks_for
from engine.weights import load_weights
from protocol.request import Request, Sampling

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
        sampling = Sampling(
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
    sizes = EngineConfig(pages=pages, max_batch=BATCH, max_model_len=length)
    return Engine(Model(config, weights, length), sizes, _prompts_first)


def _prompts_first(state: StepState) -> list[int]:
    return fill_in_order(state.remaining, state.chunk)
