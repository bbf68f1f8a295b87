"""What a pass of the model has to compute and to move, from its dimensions. Torch-free.

    FLOPs   2 for each weight that a row meets, and 4 * heads * head_dim in each layer for each pair
            of a query and a key
    bytes   the weights, once; the KV that is attended to, once for each sequence; the KV written

(Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 2.) It is what cannot be
avoided: activations, padding, and drafts before they are verified are not in it, so that time spent
on them shows as a ceiling that is not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from engine.ipc.counters import WorkDone
from engine.ipc.spec import Ceilings
from engine.kv_cache.kv_format import KVFormat
from engine.model.linear import linear
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import StepPlan
from engine.scheduling.step_time import Work
from protocol.block_keys import BLOCK_TOKENS


class PassCost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model. ``reaches``: windows, each with the number of layers that have it; 0: none."""

    row_flops: float  # of every row, attention aside
    draw_flops: float  # of a row whose logits are wanted, beside
    pair_flops: float  # of a query and a key in one layer
    reaches: tuple[tuple[int, int], ...]
    dense_bytes: float  # weights that every pass reads
    expert_bytes: float = 0.0  # of all experts
    expert_share: float = 0.0  # of the experts that one row chooses
    kv_bytes: float  # of a token in one layer

    def weight_bytes(self, rows: int) -> float:
        """Read by a pass over ``rows``: of experts those that any row chooses, if they choose
        evenly."""
        return self.dense_bytes + self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** rows)

    def add(self, done: WorkDone, plan: StepPlan, work: Work, drawing: int) -> None:
        """Count a step, before its sequences move on. ``work``: the plan's, with its drafts;
        ``drawing``: sequences that draw, those that decode first."""
        rows, decoding = work.decode_rows + work.prompt_tokens, len(plan.decode)
        queries = work.decode_rows / decoding if decoding else 0.0
        pairs = tokens = 0.0
        layers = 0
        for window, count in self.reaches:
            read, own_pairs, context = _reach(plan, work, window)
            pairs += count * (read * queries + own_pairs)
            tokens += count * (read + context)
            layers += count
        drawn = work.decode_rows - decoding + drawing
        done.flops += rows * self.row_flops + drawn * self.draw_flops + pairs * self.pair_flops
        done.weight_bytes += self.weight_bytes(rows)
        done.kv_bytes += (tokens + layers * rows) * self.kv_bytes
        done.decode_steps += decoding > 0


def _reach(plan: StepPlan, work: Work, window: int) -> tuple[float, float, float]:
    """In one layer: tokens attended to by those that decode, pairs of a query and a key in chunks,
    and tokens before the chunks that they attend to."""
    if not window:
        context = sum([s.computed for s, _ in plan.chunks])
        return work.decode_kv_tokens, work.prompt_pairs, context
    return (
        sum([min(s.computed + 1, window) for s in plan.decode]),
        sum([n * min(s.computed + n / 2, window) for s, n in plan.chunks]),
        sum([min(s.computed, window) for s, _ in plan.chunks]),
    )


def pass_cost(config: ModelConfig, kv: KVFormat, weight_bytes: int, element_bytes: int) -> PassCost:
    """``weight_bytes``: all that a pass could read; ``element_bytes``: of one weight."""
    c = config
    q, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = 2 * c.hidden_size * (q + kv_width)  # q and o; k and v
    sparse = [i for i in range(c.layers) if c.is_sparse(i)]
    mlp = (c.layers - len(sparse)) * 3 * c.hidden_size * c.intermediate_size
    expert_bytes = share = 0.0
    if c.moe is not None and sparse:
        one = 3 * c.hidden_size * c.moe.intermediate_size
        mlp += len(sparse) * (c.moe.per_token * one + c.moe.experts * c.hidden_size)
        expert_bytes = float(len(sparse) * c.moe.experts * one * element_bytes)
        share = c.moe.per_token / c.moe.experts
    return PassCost(
        row_flops=2.0 * (c.layers * attention + mlp),
        draw_flops=2.0 * c.hidden_size * c.vocab_size,
        pair_flops=4.0 * q,
        reaches=tuple((window, c.windows.count(window)) for window in sorted(set(c.windows))),
        dense_bytes=weight_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        expert_share=share,
        kv_bytes=kv.page_layer_bytes(kv.stored) / BLOCK_TOKENS,
    )


# MERGED engine.ceilings
# What the machine can do at most: measured for moments at the start.
#
#     compute     a product of square matrices in the model's type, as the engine multiplies
#     bandwidth   reading a tensor as large as the weights, or a part of them that is beyond caches;
#                 weights that fit a cache are measured against the cache
#
# The quickest of some repeats counts: whatever disturbs one makes it longer.

REPEATS = 4

_SQUARE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices: more bring no more FLOPs per second (measured)."""
_READ_BYTES = {"cpu": (8 << 20, 64 << 20), "cuda": (64 << 20, 1 << 30)}
"""Least and most that is read."""


def ceilings(
    declared: Ceilings, device: torch.device, dtype: torch.dtype, weight_bytes: int
) -> Ceilings:
    """``declared`` where it says something, measured where it does not."""
    found = Ceilings(
        flops=declared.flops or _flops(device, dtype),
        bytes=declared.bytes or _bytes(device, weight_bytes),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was allocated for this is of no more use
    return found


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    n = _SQUARE[device.type]
    weight = torch.rand(n, n, device=device).to(dtype)
    rows, product = weight.clone(), linear(weight)
    return 2.0 * n**3 / _quickest(lambda: product(rows), device)


def _bytes(device: torch.device, weight_bytes: int) -> float:
    least, most = _READ_BYTES[device.type]
    if device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(device)[0] // 4)
    count = min(most, max(least, weight_bytes)) // 4
    values = torch.ones(count, device=device)
    read = 4 * count / _quickest(values.sum, device)
    if device.type == "cpu":
        return read
    copy = torch.empty_like(values)  # a sum does not reach what a GPU's memory can do
    return max(read, 8 * count / _quickest(lambda: copy.copy_(values), device))


def _quickest(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one run."""
    run()
    timed = _events if device.type == "cuda" else _clock
    return max(1e-9, min(timed(run) for _ in range(REPEATS)))


def _clock(run: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _events(run: Callable[[], Tensor]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
