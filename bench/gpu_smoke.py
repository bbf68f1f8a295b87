"""The engine on a GPU against the limits of the GPU: a random model of Llama-3-8B's shape.

    python -m bench.gpu_smoke [--profile]
    python -m bench.gpu_smoke --device cpu --tiny      the same code, to see that it runs

Weights are drawn on the device, so no file is needed; neither are Ray and Redis. Decode at batch 1
and 32 with 512 tokens of context, and prefill of 2048 tokens in chunks of 512, each with exact and
with fp8 KV, beside the floor: bytes over the bandwidth of a large copy, or operations over the rate
of a large product, whichever takes longer; both measured here. Times are wall times between points
at which the tokens are on the host. --profile shows which kernels they go to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.floor import Cost, Floor, Machine, measure
from bench.gpu_runs import Sizes, decode, engine_for, fill, prefill, timed_steps
from bench.report import Row, finish
from engine.config import ModelConfig
from engine.families import parse_config
from engine.kv_format import Precision
from engine.model import Model
from engine.weights import random_weights

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
FULL_SIZES = Sizes(batches=(1, 32), context=512, steps=64, prompt=2048, chunk=512)
TINY_SIZES = Sizes(batches=(1, 4), context=64, steps=8, prompt=128, chunk=32)
FULL_READ, FULL_GEMM = 4 << 30, 8192
TINY_READ, TINY_GEMM = 1 << 20, 128
PRECISIONS: tuple[Precision, ...] = ("exact", "fp8")


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    model: Model
    sizes: Sizes
    machine: Machine

    def rows(self, precision: Precision) -> list[Row]:
        engine = engine_for(self.model, self.sizes, precision)
        cost = Cost.of(self.model, engine.format.bytes_per_token)
        found = []
        for batch in self.sizes.batches:
            _reset_peak(self.model.device)
            step_s, attended = decode(engine, self.sizes, batch)
            floor = cost.decode(self.machine, batch, attended / batch)
            at = f"decode, batch {batch}, {precision} KV"
            found.append(_against(at, step_s, floor))
            found.append(Row(f"{at}: rate", batch / step_s, "tok/s"))
            found += _peak(at, self.model.device)
        _reset_peak(self.model.device)
        prompt_s = prefill(engine, self.sizes)
        floor = cost.prefill(self.machine, 1, self.sizes.prompt)
        at = f"prefill of {self.sizes.prompt}, {precision} KV"
        found.append(_against(at, prompt_s, floor))
        found.append(Row(f"{at}: rate", self.sizes.prompt / prompt_s, "tok/s"))
        return found + _peak(at, self.model.device)

    def profile(self, precision: Precision) -> Iterator[str]:
        """Tables of the kernels of decode steps at the largest batch, and of a prefill."""
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


def _against(name: str, taken_s: float, floor: Floor) -> Row:
    """Milliseconds beside the floor; the ratio is 1 at the floor."""
    text = f"floor ({floor.wall}) {floor.seconds * 1e3:.3g} ms"
    return Row(name, taken_s * 1e3, "ms", text, floor.seconds / taken_s)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(name: str, device: torch.device) -> list[Row]:
    if device.type != "cuda":
        return []
    return [Row(f"{name}: peak memory", torch.cuda.max_memory_allocated(device) / 2**30, "GiB")]


def shape(tiny: bool) -> ModelConfig:
    return parse_config(TINY if tiny else LLAMA_3_8B, "gpu_smoke")


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
    model = Model(config, random_weights(config, dtype, device), sizes.longest)
    bench = Bench(model, sizes, machine)
    found = [
        Row("bandwidth", machine.bandwidth / 1e9, "GB/s"),
        Row("rate of products", machine.rate / 1e12, "TFLOP/s"),
        Row("weights that a step reads", model.weights.bytes / 2**30, "GiB"),
    ]
    for precision in PRECISIONS:
        found += bench.rows(precision)
        if chosen.profile:
            print(*bench.profile(precision), sep="\n")
    finish("gpu_smoke", found)


if __name__ == "__main__":
    main()
