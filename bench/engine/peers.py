"""transformers as a contestant: ``generate`` with SDPA, and its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.engine.contestants import ContestantRun, steady_rate

NEVER = -1
"""No token has this id: generation ends by length only."""


class _Stamps(BaseStreamer):
    """Notes when the tokens of each step come; the first entry is that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time of the tokens [batch] of a step, or of the prompt [batch, tokens]."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Transformers:
    def __init__(self) -> None:
        torch.set_grad_enabled(False)
        self._model: Any = None

    def load(self, folder: str) -> None:
        self._model = None  # the one before goes first
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()


class GenerateContestant(_Transformers):
    """Static batch: prompts of one length, all sequences step together."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> ContestantRun:
        ids = torch.tensor(prompts)
        stamps = _Stamps()
        options = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=NEVER, pad_token_id=0
        )
        began = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=options,
            streamer=stamps,
        )
        wall = time.perf_counter() - began
        tokens = out[:, ids.shape[1] :].tolist()
        assert len(stamps.times) == 1 + new_tokens
        return ContestantRun(wall, steady_rate([stamps.times[1:]] * len(prompts)), tokens)


class GenerateBatchContestant(_Transformers):
    """Continuous batching over a paged cache; pages and steps are of the size of the engine's."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> ContestantRun:
        page, step = 32, 512
        pages = sum(-(-(len(prompt) + new_tokens) // page) + 1 for prompt in prompts)
        sizes = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=step)
        options = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=NEVER, pad_token_id=0
        )
        began = time.perf_counter()
        out = self._model.generate_batch(
            prompts,
            generation_config=options,
            continuous_batching_config=sizes,
            record_timestamps=True,
            warmup=False,
        )
        wall = time.perf_counter() - began
        results = list(out.values())
        tokens = [list(result.generated_tokens) for result in results]
        if [len(text) for text in tokens] != [new_tokens] * len(prompts):
            raise RuntimeError(f"{[len(text) for text in tokens]} tokens came")
        return ContestantRun(wall, steady_rate([result.timestamps for result in results]), tokens)
