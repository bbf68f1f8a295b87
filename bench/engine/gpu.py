"""The engine on a GPU beside the limits of the GPU: a random model of Llama-3-8B's shape.

    python -m bench.engine.gpu [--profile]
    python -m bench.engine.gpu --device cpu --tiny      the same code, to see that it runs

Weights are drawn on the device, so that the benchmark needs no files, Ray or Redis. It decodes at
batch 1 and 32 with 512 tokens of context, and prefills 2048 tokens in chunks of 512, each with
exact and with fp8 KV. The floor is the larger of bytes over the bandwidth of a large copy and
operations over the rate of a large product, both measured in the same run. Times are wall times
between points at which the tokens are on the host. ``--profile`` prints the kernels.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.lib.engines import engine_config
from bench.lib.report import ResultRow, finish, median
from bench.lib.roofline import MachineLimits, ModelCost, StepFloor, measure
from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Precision
from engine.model.decoder import DecoderModel
from engine.model.weights import random_weights
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from engine.scheduling.sequence import blocks_for
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

WARM_STEPS = 8
"""Decode steps before those that are timed."""

PREFILLS = 3
"""Prompts that are timed, after one that is not."""


@dataclass(frozen=True)
class EngineSizes:
    batches: Sequence[int]
    context: int  # tokens of each prompt before decoding
    steps: int  # decode steps that count
    prompt: int  # tokens of the prompt to prefill
    chunk: int

    @property
    def new_tokens(self) -> int:
        """Output tokens of each request: enough that no sequence ends while steps are timed."""
        each = -(-self.context // self.chunk) + 1
        return each * max(self.batches) + WARM_STEPS + self.steps

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self.prompt + 1, self.context + self.new_tokens)


def engine_for(model: DecoderModel, sizes: EngineSizes, precision: Precision) -> Engine:
    """Make an engine as a worker on a GPU does, where fp8 KV is stored as bytes."""
    each = blocks_for(sizes.context + sizes.new_tokens)
    config = engine_config(
        pages=max(max(sizes.batches) * each, blocks_for(sizes.prompt + 1)),
        max_batch=max(sizes.batches),
        chunk=sizes.chunk,
        max_model_len=sizes.longest,
        step_budget_ms=0.0,
        kv_precision=precision,
        kv_storage="fp8" if precision == "fp8" else "wide",
    )
    return Engine(model, config, plan_decode_step)


def add(engine: Engine, handle: int, length: int, new_tokens: int) -> None:
    """Add a greedy request of random tokens that shares no prefix with others."""
    draw = random.Random(handle)
    prompt = tuple(draw.randrange(engine.model.config.vocab_size) for _ in range(length))
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    root = os.urandom(16)
    engine.generate(handle, Request(id="bench", prompt=prompt, sampling=sampling, cache_root=root))


def fill(engine: Engine, sizes: EngineSizes, batch: int) -> None:
    """Prefill ``batch`` prompts and decode until the last of them has run its warm-up."""
    for handle in range(batch):
        add(engine, handle, sizes.context, sizes.new_tokens)
    while len(engine.scheduler.decoding) < batch:
        engine.run(engine.plan())
    timed_steps(engine, WARM_STEPS)


def timed_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """Return the median seconds of a decode step and the mean KV tokens that a step attends to.

    A step ends when its tokens are on the host.
    """
    taken, attended = [], 0
    for _ in range(steps):
        began = time.perf_counter()
        step = engine.plan()
        engine.run(step)
        taken.append(time.perf_counter() - began)
        assert not step.chunks
        attended += step.work.decode_kv_tokens
    return median(taken), attended / steps


def decode(engine: Engine, sizes: EngineSizes, batch: int) -> tuple[float, float]:
    """Run ``timed_steps`` with ``batch`` sequences, and drop them afterwards."""
    fill(engine, sizes, batch)
    measured = timed_steps(engine, sizes.steps)
    assert len(engine.scheduler.decoding) == batch
    for handle in range(batch):
        engine.drop(handle)
    return measured


def prefill(engine: Engine, sizes: EngineSizes) -> float:
    """Return the median seconds from a prompt to its first token while nothing else runs."""
    taken = []
    for handle in range(PREFILLS + 1):
        add(engine, handle, sizes.prompt, 1)
        began = time.perf_counter()
        while step := engine.plan():
            engine.run(step)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}
TINY = {
    **LLAMA_3_8B,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
FULL_SIZES = EngineSizes(batches=(1, 32), context=512, steps=64, prompt=2048, chunk=512)
TINY_SIZES = EngineSizes(batches=(1, 4), context=64, steps=8, prompt=128, chunk=32)
FULL_READ, FULL_GEMM = 4 << 30, 8192
TINY_READ, TINY_GEMM = 1 << 20, 128
PRECISIONS: tuple[Precision, ...] = ("exact", "fp8")


@dataclass(frozen=True)
class EngineBenchmark:
    """The model and the limits of the device that all measurements share."""

    model: DecoderModel
    sizes: EngineSizes
    machine: MachineLimits

    def rows(self, precision: Precision) -> list[ResultRow]:
        engine = engine_for(self.model, self.sizes, precision)
        cost = ModelCost.of(self.model, engine.format.bytes_per_token)
        found = []
        for batch in self.sizes.batches:
            _reset_peak(self.model.device)
            step_s, attended = decode(engine, self.sizes, batch)
            floor = cost.decode(self.machine, batch, attended / batch)
            at = f"decode, batch {batch}, {precision} KV"
            found.append(_against(at, step_s, floor))
            found.append(ResultRow(f"{at}: rate", batch / step_s, "tok/s"))
            found += _peak(at, self.model.device)
        _reset_peak(self.model.device)
        prompt_s = prefill(engine, self.sizes)
        floor = cost.prefill(self.machine, 1, self.sizes.prompt)
        at = f"prefill of {self.sizes.prompt}, {precision} KV"
        found.append(_against(at, prompt_s, floor))
        found.append(ResultRow(f"{at}: rate", self.sizes.prompt / prompt_s, "tok/s"))
        return found + _peak(at, self.model.device)

    def profile(self, precision: Precision) -> Iterator[str]:
        """Yield tables of the kernels of decode steps at the largest batch, and of a prefill."""
        engine = engine_for(self.model, self.sizes, precision)
        fill(engine, self.sizes, max(self.sizes.batches))
        yield f"{precision} KV, 4 decode steps\n{self._table(lambda: timed_steps(engine, 4))}"
        for handle in list(engine.scheduler.sequences):
            engine.drop(handle)
        yield f"{precision} KV, prefills\n{self._table(lambda: prefill(engine, self.sizes))}"

    def _table(self, call: Callable[[], object]) -> str:
        on_gpu = self.model.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as found:
            call()
        key = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table: str = found.key_averages().table(sort_by=key, row_limit=25)
        return table


def _against(name: str, taken_s: float, floor: StepFloor) -> ResultRow:
    """Make a row of milliseconds beside the floor; the ratio is 1 at the floor."""
    text = f"floor ({floor.wall}) {floor.seconds * 1e3:.3g} ms"
    return ResultRow(name, taken_s * 1e3, "ms", text, floor.seconds / taken_s)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(name: str, device: torch.device) -> list[ResultRow]:
    if device.type != "cuda":
        return []
    return [
        ResultRow(f"{name}: peak memory", torch.cuda.max_memory_allocated(device) / 2**30, "GiB")
    ]


def shape(tiny: bool) -> ModelConfig:
    return parse_config(TINY if tiny else LLAMA_3_8B, "engine_gpu")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (the default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to see that it runs")
    parser.add_argument("--profile", action="store_true", help="tables of a decode step as well")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --tiny runs the same code without one")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.set_grad_enabled(False)
    read, gemm = (TINY_READ, TINY_GEMM) if chosen.tiny else (FULL_READ, FULL_GEMM)
    machine = measure(read, gemm, dtype, device)
    sizes = TINY_SIZES if chosen.tiny else FULL_SIZES
    config = shape(chosen.tiny)
    model = DecoderModel(config, random_weights(config, dtype, device), sizes.longest)
    bench = EngineBenchmark(model, sizes, machine)
    found = [
        ResultRow("bandwidth", machine.bandwidth / 1e9, "GB/s"),
        ResultRow("rate of products", machine.rate / 1e12, "TFLOP/s"),
        ResultRow("weights that a step reads", model.weights.bytes / 2**30, "GiB"),
    ]
    for precision in PRECISIONS:
        found += bench.rows(precision)
        if chosen.profile:
            print(*bench.profile(precision), sep="\n")
    finish("engine_gpu", found)


if __name__ == "__main__":
    main()
