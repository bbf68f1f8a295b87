"""The FLOPs and bytes that a pass of the model needs, computed from the model's dimensions.

    FLOPs   2 per weight and row, and 4 * heads * head_dim per layer for each pair of query and key
    bytes   the weights once, the KV attended to once per sequence, and the KV written

Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 2. These are lower
bounds: they leave out activations, padding and the drafting itself, so time spent on those shows as
a ceiling that is not reached. The stepper adds up the cost of its steps, and the planner predicts
from the same figures; this module imports no torch.
"""

from __future__ import annotations

import msgspec

from engine.ipc.counters import WorkDone
from engine.kv_cache.kv_format import KVFormat
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import StepPlan
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepWork


class PassCost(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one model. ``pass_cost`` creates it."""

    row_flops: float  # per row, without attention
    draw_flops: float  # additional, per row with logits
    pair_flops: float  # per pair of query and key, in one layer
    reaches: tuple[tuple[int, int], ...]  # (window, number of layers with it); window 0: none
    dense_bytes: float  # weights that every pass reads
    expert_bytes: float = 0.0  # weights of all experts
    expert_share: float = 0.0  # share of the experts that one row uses
    kv_bytes: float  # per token, in one layer

    @property
    def pair_rows(self) -> float:
        """The FLOPs of a pair in all layers without a window, as a share of a row's."""
        whole = sum(count for window, count in self.reaches if not window)
        return whole * self.pair_flops / self.row_flops

    def weight_bytes(self, rows: int) -> float:
        """Return the weight bytes that a pass over ``rows`` reads, if rows choose experts evenly
        and independently."""
        return self.dense_bytes + self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** rows)

    def add(self, done: WorkDone, plan: StepPlan, work: StepWork, drawing: int) -> None:
        """Add a step to ``done``, before its sequences advance. ``work`` is that of the plan and of
        its drafts; ``drawing`` counts the sequences that draw a token."""
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


def _reach(plan: StepPlan, work: StepWork, window: int) -> tuple[float, float, float]:
    """Return for one layer the tokens that decoding sequences attend to, the pairs of query and key
    in chunks, and the context tokens that chunks attend to."""
    if not window:
        context = sum([s.computed for s, _ in plan.chunks])
        return work.decode_kv_tokens, work.prompt_pairs, context
    return (
        sum([min(s.computed + 1, window) for s in plan.decode]),
        sum([n * min(s.computed + n / 2, window) for s, n in plan.chunks]),
        sum([min(s.computed, window) for s, _ in plan.chunks]),
    )


def pass_cost(config: ModelConfig, kv: KVFormat, weight_bytes: int, element_bytes: int) -> PassCost:
    """Return the costs of a model whose weights take ``weight_bytes``, ``element_bytes`` each."""
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
        kv_bytes=kv.block_layer_bytes(kv.stored) / BLOCK_TOKENS,
    )
