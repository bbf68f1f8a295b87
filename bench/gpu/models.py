"""Models with random weights on a device, and engines whose sequences need no prefill.

Filling contexts of 32k tokens by prefill would take most of the time of the command, so sequences
are placed: they are received like those of a hand-over, and their pages hold random KV that was
written to the whole pool once. Nothing that a decode step computes depends on how KV came there.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.gpu.part import PartContext
from engine.execution.engine import Engine, EngineConfig
from engine.execution.warm_up import decode_over_pool, warm_up
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, Precision, Storage
from engine.model.decoder import DecoderModel
from engine.model.weights import random_weights
from engine.model_config.families import parse_config
from engine.scheduling.sequence import blocks_for
from engine.scheduling.step_policy import plan_decode_step
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,  # longer than the model's own, for long contexts
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}
TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
WORKSPACE_BYTES = 8 << 30
"""Memory of a GPU that pools leave free, for activations, graphs and the context of CUDA."""

FRAME_PAGES = 64
"""Pages of random KV that are written at a time."""


def random_model(context: PartContext, positions: int) -> DecoderModel:
    """Return a model of Llama-3-8B's shape, or a tiny one, with weights drawn on the device."""
    config = parse_config(TINY if context.tiny else LLAMA_3_8B, "bench.gpu")
    return DecoderModel(config, random_weights(config, context.dtype, context.device), positions)


def make_engine(
    model: DecoderModel,
    *,
    pages: int,
    max_batch: int,
    chunk: int,
    max_model_len: int,
    precision: Precision = "fp8",
    recorded: bool = True,
) -> Engine:
    """Return an engine as a decode worker on a GPU has it, where fp8 KV is stored as bytes, after
    its warm-up. ``recorded``: it runs its steps in CUDA graphs where there is one."""
    storage: Storage = "fp8" if precision == "fp8" else "wide"
    config = EngineConfig(
        pages=pages,
        max_batch=max_batch,
        prefill_chunk=chunk,
        max_model_len=max_model_len,
        step_budget_ms=0.0,
        ttft_slo_s=None,
        tpot_slo_s=None,
        kv_precision=precision,
        kv_storage=storage,
        batch_invariant=False,
    )
    engine = Engine(model, config, plan_decode_step)
    warm_up(engine)
    if model.uses_kernels and recorded:
        engine.record_graphs(lambda _: None)
        warm_up(engine)
    return engine


def fitting_pages(context: PartContext, model: DecoderModel, wanted: int) -> int:
    """Return how many pages of fp8 KV fit beside the model, at most ``wanted``."""
    if context.on_cpu:
        return wanted
    release_memory(context)
    kv = model.config.kv_format("fp8", "fp8", model.dtype.itemsize)
    free = torch.cuda.mem_get_info(context.device)[0] - WORKSPACE_BYTES
    return min(wanted, max(2, free // (kv.bytes_per_token * BLOCK_TOKENS)))


def greedy(length: int) -> SamplingParams:
    """Return the parameters of a request that draws greedily and ends by ``length`` alone."""
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)


def random_request(vocab: int, seed: int, length: int, new_tokens: int) -> Request:
    """Return a greedy request of ``length`` random tokens that shares no prefix with any other."""
    draw = random.Random(seed)
    prompt = tuple(draw.choices(range(vocab), k=length))
    return Request(
        id=str(seed), prompt=prompt, sampling=greedy(new_tokens), cache_root=os.urandom(16)
    )


def random_frame(kv: KVFormat, pages: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [bytes] uint8: random KV of ``pages`` pages in all layers, in the pool's own codec.

    The fp8 bytes have one bit of the exponent cleared, because two of the 256 are no numbers."""
    size = kv.layers * pages * kv.block_layer_bytes(kv.stored)
    if kv.stored is Codec.RAW:
        return torch.randn(size // dtype.itemsize, device=device).to(dtype).view(torch.uint8)
    payload = size // (kv.head_dim + 1) * kv.head_dim
    frame = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    frame[:payload].bitwise_and_(0xF7)
    frame[payload:] = 9  # scales of 2^-6
    return frame


def fill_pool(engine: Engine) -> None:
    """Write random KV to every page of an engine without sequences."""
    kv, pages = engine.format, engine.config.pages
    for first in range(0, pages, FRAME_PAGES):
        count = min(FRAME_PAGES, pages - first)
        frame = random_frame(kv, count, engine.model.dtype, engine.model.device)
        piece = KVPiece(0, kv.layers, 0, count)
        engine.pool.write(piece, range(first, first + count), frame, kv.stored)


def place(engine: Engine, count: int, length: int, new_tokens: int) -> None:
    """Let ``count`` sequences with a context of ``length`` tokens decode from the next step on,
    over the KV that lies in the pool. Handles are 0 to ``count`` - 1."""
    request = random_request(engine.model.config.vocab_size, count, length, new_tokens)
    decode_over_pool(engine, request, range(count))


def drop_all(engine: Engine) -> None:
    """Drop all sequences and forget their cached blocks."""
    for handle in list(engine.scheduler.sequences):
        engine.drop(handle)
    engine.manager.evict_unused()


def pages_of(count: int, tokens: int) -> int:
    """Return the pages of ``count`` sequences of ``tokens`` tokens."""
    return count * blocks_for(tokens)


def timed_steps(engine: Engine, warm: int, steps: int) -> list[float]:
    """Return the seconds of ``steps`` steps, after ``warm`` others. A step ends when its tokens are
    on the host."""
    taken = []
    with collector_paused():
        for _ in range(warm + steps):
            began = time.perf_counter()
            engine.run(engine.plan())
            taken.append(time.perf_counter() - began)
    return taken[warm:]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect garbage now and not again within, as the engine process does once it has loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_memory(context: PartContext) -> None:
    """Return the memory of engines that are no longer referenced to the device."""
    gc.collect()
    if not context.on_cpu:
        torch.cuda.empty_cache()


def shape_of(context: PartContext) -> Mapping[str, Any]:
    """Return the config.json of the model of this run."""
    return TINY if context.tiny else LLAMA_3_8B
