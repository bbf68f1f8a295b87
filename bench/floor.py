"""The least time that a machine needs for a step: bytes over bandwidth, operations over rate.

Bandwidth is that of reading a large tensor (on a CPU, by ``torch.sum``, the fastest reader there)
or of copying one (on a GPU, bytes read and written); the rate is that of a large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.report import median
from engine.linear import linear
from engine.model import Model

REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """What one device, or one thread of a CPU, can do."""

    bandwidth: float  # bytes per second
    rate: float  # floating point operations per second


class Floor(NamedTuple):
    """Seconds that a step takes at least, by either limit."""

    bytes_s: float
    operations_s: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def wall(self) -> str:
        return "bytes" if self.bytes_s >= self.operations_s else "operations"


@dataclass(frozen=True)
class Cost:
    """What a model moves and computes."""

    weight_bytes: int  # read by a step
    parameters: int  # that multiply every token
    head_parameters: int  # of these, only for a token whose logits are wanted
    attention_width: int  # layers * heads * head_dim
    kv_bytes: float  # of a token, as the pool holds it

    @classmethod
    def of(cls, model: Model, kv_bytes: float) -> Cost:
        """Of a dense model whose pool takes ``kv_bytes`` for a token."""
        c, weights = model.config, model.weights
        size = model.dtype.itemsize
        return cls(
            weight_bytes=weights.bytes,
            parameters=weights.bytes // size,
            head_parameters=weights.head.bytes // size,
            attention_width=c.layers * c.heads * c.head_dim,
            kv_bytes=kv_bytes,
        )

    def decode(self, machine: Machine, batch: int, context: float) -> Floor:
        """A step of ``batch`` sequences that attend to ``context`` tokens: every weight and the
        KV of every sequence is read once; two operations for each parameter and token."""
        moved = self.weight_bytes + batch * context * self.kv_bytes
        operations = 2 * self.parameters * batch + 4 * self.attention_width * batch * context
        return Floor(moved / machine.bandwidth, operations / machine.rate)

    def prefill(self, machine: Machine, sequences: int, tokens: int) -> Floor:
        """Prompts of ``tokens`` tokens, all at once: (2 N u + 4 L d u^2 / 2) each, the head for the
        last token only; KV is written once."""
        body = 2 * (self.parameters - self.head_parameters) * tokens + 2 * self.head_parameters
        pairs = 4 * self.attention_width * tokens * tokens / 2
        moved = self.weight_bytes + sequences * tokens * self.kv_bytes
        return Floor(moved / machine.bandwidth, sequences * (body + pairs) / machine.rate)


def seconds(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median wall time of ``call``, computed to its end, after one call that does not count."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def bandwidth(size: int, device: torch.device) -> float:
    """Bytes per second over a tensor of ``size`` bytes. What fits into a cache is read from there,
    in a model's step as well: measure with the size of what the step reads."""
    x = torch.ones(size // 4, device=device)  # fp32
    if device.type == "cpu":
        return size / seconds(x.sum, device)
    y = torch.empty_like(x)
    return 2 * size / seconds(lambda: y.copy_(x), device)


def gemm_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a product of two [size, size] matrices, by the faster of torch.mm
    and the engine's own product: on some CPUs, torch.mm reaches half of what oneDNN does."""
    a = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, a, out=out)]
    if device.type == "cpu":
        weight = linear(a)
        products.append(lambda: weight(a))
    return 2 * size**3 / min(seconds(product, device) for product in products)


def measure(read_bytes: int, gemm_size: int, dtype: torch.dtype, device: torch.device) -> Machine:
    return Machine(bandwidth(read_bytes, device), gemm_rate(gemm_size, dtype, device))
