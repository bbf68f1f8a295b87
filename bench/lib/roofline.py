"""The least time that a machine needs for a step: bytes over bandwidth, operations over rate.

Bandwidth is that of reading a large tensor (on a CPU, by ``torch.sum``, the fastest reader there)
or of copying one (on a GPU, bytes read and written); the rate is that of a large matrix product.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.lib.report import median
from engine.model.decoder import DecoderModel
from engine.model.linear import make_linear

REPEATS = 5
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MachineLimits:
    """The measured bandwidth and arithmetic rate of one device, or of one thread of a CPU."""

    bandwidth: float  # bytes per second
    rate: float  # floating point operations per second


class StepFloor(NamedTuple):
    """The least seconds of a step, by bandwidth and by arithmetic."""

    bytes_s: float
    operations_s: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def wall(self) -> str:
        return "bytes" if self.bytes_s >= self.operations_s else "operations"


@dataclass(frozen=True)
class ModelCost:
    """The bytes that a model moves and the operations that it computes."""

    weight_bytes: int  # read by a step
    parameters: int  # that multiply every token
    head_parameters: int  # of these, only for a token whose logits are wanted
    attention_width: int  # layers * heads * head_dim
    kv_bytes: float  # of a token, as the pool holds it

    @classmethod
    def of(cls, model: DecoderModel, kv_bytes: float) -> ModelCost:
        """Compute the cost of a dense model whose pool takes ``kv_bytes`` per token."""
        c, weights = model.config, model.weights
        size = model.dtype.itemsize
        return cls(
            weight_bytes=weights.bytes,
            parameters=weights.bytes // size,
            head_parameters=weights.head.bytes // size,
            attention_width=c.layers * c.heads * c.head_dim,
            kv_bytes=kv_bytes,
        )

    def decode(self, machine: MachineLimits, batch: int, context: float) -> StepFloor:
        """A step of ``batch`` sequences that attend to ``context`` tokens: every weight and the
        KV of every sequence is read once; two operations for each parameter and token."""
        moved = self.weight_bytes + batch * context * self.kv_bytes
        operations = 2 * self.parameters * batch + 4 * self.attention_width * batch * context
        return StepFloor(moved / machine.bandwidth, operations / machine.rate)

    def prefill(
        self, machine: MachineLimits, sequences: int, tokens: int, cached: int = 0
    ) -> StepFloor:
        """Prompts of ``tokens`` tokens behind ``cached`` ones, all at once: (2 N u + 4 L d u (c +
        u / 2)) each, the head for the last token only; KV is written once, and the cached KV read
        once."""
        body = 2 * (self.parameters - self.head_parameters) * tokens + 2 * self.head_parameters
        pairs = 4 * self.attention_width * tokens * (cached + tokens / 2)
        moved = self.weight_bytes + sequences * (tokens + cached) * self.kv_bytes
        return StepFloor(moved / machine.bandwidth, sequences * (body + pairs) / machine.rate)


def seconds(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median wall time of ``call`` with synchronization, after one warm-up call."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def recorded_seconds(
    call: Callable[[], object], device: torch.device, repeats: int = REPEATS
) -> float:
    """Return the median time of a replay of ``call``, recorded in a CUDA graph so that launching
    takes no time on the host. On a CPU it is ``seconds``."""
    if device.type == "cpu":
        return seconds(call, device, repeats)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles what is launched for the first time
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, device, repeats)


def bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes per second over a tensor of ``size`` bytes.

    A tensor that fits into a cache is read from the cache, in a model's step as well, so measure
    with the bytes that the step reads.
    """
    x = torch.ones(size // 4, device=device)  # fp32
    if device.type == "cpu":
        return size / seconds(x.sum, device)
    y = torch.empty_like(x)
    return 2 * size / seconds(lambda: y.copy_(x), device)


def gemm_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a product of two [size, size] matrices.

    It is that of the faster of torch.mm and the engine's own product: on some CPUs torch.mm reaches
    half of the rate of oneDNN.
    """
    a = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, a, out=out)]
    if device.type == "cpu":
        weight = make_linear(a)
        products.append(lambda: weight(a))
    return 2 * size**3 / min(seconds(product, device) for product in products)


def measure(
    read_bytes: int, gemm_size: int, dtype: torch.dtype, device: torch.device
) -> MachineLimits:
    return MachineLimits(bandwidth(read_bytes, device), gemm_rate(gemm_size, dtype, device))


def quiet_core() -> int | None:
    """Return the core for all contestants, which take turns, or None if none can be chosen."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
