"""The engine beside transformers' continuous batching, both with an 8B shape and random weights.

All prompts come at once. Both compute in bf16 with exact KV and draw greedily; the rate counts
output tokens over the whole time, prompts included. Texts are not compared, because the weights are
drawn separately. The peer runs as it configures itself, after one run that is not timed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.models import (
    collector_paused,
    drop_all,
    greedy,
    make_engine,
    pages_of,
    random_model,
    release_memory,
    shape_of,
)
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median
from engine.execution.engine import Engine
from protocol.requests import Request

PEER_AIM = 3.0
ROUNDS = 2


@dataclass(frozen=True)
class PeerSizes:
    batch: int
    prompt: int
    new_tokens: int


FULL = PeerSizes(64, 512, 256)
TINY = PeerSizes(3, 24, 6)


def measure_peers(context: PartContext) -> None:
    """Measure the part ``peers``; without transformers it has no rows."""
    if importlib.util.find_spec("transformers") is None:
        context.note("peers: transformers is not installed")
        return
    sizes = TINY if context.tiny else FULL
    engine_s = _engine_seconds(context, sizes)
    release_memory(context)
    ours = sizes.batch * sizes.new_tokens / engine_s
    name = f"engine, {sizes.batch} prompts of {sizes.prompt}, {sizes.new_tokens} tokens each"
    try:
        peer_s = _peer_seconds(context, sizes)
    except Exception as error:  # a peer may fail in any way
        context.note(f"peers: transformers failed with {type(error).__name__}: {error}")
        context.add(GpuResult(name, ours, "tok/s", "transformers did not run"))
        return
    theirs = sizes.batch * sizes.new_tokens / peer_s
    text = f"generate_batch {theirs:.0f} tok/s"
    context.add(GpuResult(name, ours, "tok/s", text, ours / theirs, PEER_AIM))


def prompts_of(sizes: PeerSizes, vocab: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [draw.choices(range(3, vocab), k=sizes.prompt) for _ in range(sizes.batch)]


def _engine_seconds(context: PartContext, sizes: PeerSizes) -> float:
    longest = sizes.prompt + sizes.new_tokens
    engine = make_engine(
        random_model(context, longest),
        pages=pages_of(sizes.batch, longest),
        max_batch=sizes.batch,
        chunk=2048,
        max_model_len=longest,
        precision="exact",
    )
    vocab = engine.model.config.vocab_size
    return median([_run_engine(engine, sizes, vocab, i) for i in range(ROUNDS + 1)][1:])


def _run_engine(engine: Engine, sizes: PeerSizes, vocab: int, seed: int) -> float:
    prompts = prompts_of(sizes, vocab, seed)
    with collector_paused():
        began = time.perf_counter()
        drawn = 0
        for handle, prompt in enumerate(prompts):
            sampling, root = greedy(sizes.new_tokens), os.urandom(16)
            engine.generate(
                handle,
                Request(id=str(handle), prompt=tuple(prompt), sampling=sampling, cache_root=root),
            )
        while plan := engine.plan():
            drawn += len(engine.run(plan))
        taken = time.perf_counter() - began
    assert drawn == sizes.batch * sizes.new_tokens
    drop_all(engine)
    return taken


def _peer_seconds(context: PartContext, sizes: PeerSizes) -> float:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    config = AutoConfig.for_model("llama", **shape_of(context))
    with torch.device(context.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=context.dtype, attn_implementation="sdpa"
        ).eval()
    # No token has the id -1: generation ends by length only.
    options: dict[str, Any] = {
        "generation_config": GenerationConfig(
            max_new_tokens=sizes.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "persistent_manager": True,  # so that only the first run pays for its start
    }
    if context.on_cpu:  # where it would take most of the memory for its cache
        options["continuous_batching_config"] = ContinuousBatchingConfig(
            page_size=32, num_blocks=16, max_batch_tokens=128
        )
    try:
        taken = [
            _run_peer(model, prompts_of(sizes, config.vocab_size, seed), sizes, options)
            for seed in range(ROUNDS + 1)
        ]
    finally:  # its thread would keep this process alive
        model.destroy_cached_continuous_batching_manager()
    return median(taken[1:])


def _run_peer(
    model: Any, prompts: list[list[int]], sizes: PeerSizes, options: dict[str, Any]
) -> float:
    began = time.perf_counter()
    out = model.generate_batch(prompts, **options)
    taken = time.perf_counter() - began
    lengths = [len(result.generated_tokens) for result in out.values()]
    if lengths != [sizes.new_tokens] * sizes.batch:
        raise RuntimeError(f"{lengths} tokens came")
    return taken
