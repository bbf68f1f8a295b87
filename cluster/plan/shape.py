"""What a model asks of any machine: FLOPs and bytes, from its config or from a few numbers. Pure.

The arithmetic is that of the workers themselves (engine/work_cost.py), so that a plan and the
walls that a live cluster names are of the same figures.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.config import ModelConfig
from engine.kv_format import Codec, KVFormat, Precision
from engine.work_cost import PassCost, pass_cost
from protocol.blocks import BLOCK_TOKENS


class Work(NamedTuple):
    """Of a pass: products with weights, and attention."""

    linear_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one type. ``weight_bytes``: that have to lie in memory; ``cost``: what a pass
    computes and reads, its ``pair_flops`` and ``kv_bytes`` of one layer."""

    name: str
    parameters: float
    active: float  # of them, that a token meets
    element_bytes: int
    weight_bytes: float
    cost: PassCost
    kv: KVFormat

    @property
    def kv_bytes(self) -> float:
        """Of the pool, that a token takes."""
        return float(self.kv.bytes_per_token)

    def wire_bytes(self, codec: Codec) -> float:
        """Of a token on its way to a decode worker."""
        return self.kv.layers * self.kv.page_layer_bytes(codec) / BLOCK_TOKENS

    @property
    def codec(self) -> Codec:
        """What ``auto`` sends (kvtransfer/codecs.py): the fewest bytes that change no value."""
        return min(self.kv.codecs, key=self.kv.page_layer_bytes)

    def reached(self, context: float) -> float:
        """Tokens that a query attends to after ``context`` others, of all layers together."""
        return sum(
            count * (min(context, window) if window else context)
            for window, count in self.cost.reaches
        )

    def decode(self, batch: float, context: float) -> Work:
        """A step in which ``batch`` sequences with ``context`` tokens each decode: weights are read
        once, KV once for each sequence."""
        reached = batch * self.reached(context)
        return Work(
            batch * (self.cost.row_flops + self.cost.draw_flops),
            reached * self.cost.pair_flops,
            self.cost.weight_bytes(max(1, round(batch))),
            reached * self.cost.kv_bytes,
        )

    def prompt(self, cached: float, tokens: float) -> Work:
        """A pass over ``tokens`` tokens after ``cached`` ones (Pope et al., 2022, section 2)."""
        return Work(
            tokens * self.cost.row_flops + self.cost.draw_flops,
            tokens * self.reached(cached + tokens / 2) * self.cost.pair_flops,
            self.cost.weight_bytes(max(1, round(tokens))),
            self.reached(cached + tokens) * self.cost.kv_bytes,
        )


def of_config(
    config: ModelConfig, name: str, precision: Precision, element_bytes: int = 2
) -> Shape:
    """A model that the engine serves, on a GPU: an fp8 pool where KV is on the fp8 grid."""
    kv = config.kv_format(precision, "fp8" if precision == "fp8" else "wide", element_bytes)
    embedding = config.vocab_size * config.hidden_size
    parameters = count(config)
    # All but the embedding, of which rows are looked up, are read; a tied head is the embedding.
    read = parameters if config.tied_embeddings else parameters - embedding
    cost = pass_cost(config, kv, read * element_bytes, element_bytes)
    return Shape(
        name=name,
        parameters=parameters,
        active=(cost.row_flops + cost.draw_flops) / 2.0,
        element_bytes=element_bytes,
        weight_bytes=float(parameters * element_bytes),
        cost=cost,
        kv=kv,
    )


def of_numbers(
    name: str,
    parameters: float,
    kv: KVFormat,
    *,
    active: float | None = None,
    heads: int | None = None,
) -> Shape:
    """A dense model, or one of whose parameters a token meets ``active``: its experts then count as
    read by every step. ``heads``: of queries; None: as many as of keys."""
    met = parameters if active is None else active
    cost = PassCost(
        row_flops=2.0 * met,
        draw_flops=0.0,
        pair_flops=4.0 * (heads or kv.kv_heads) * kv.head_dim,
        reaches=((0, kv.layers),),
        dense_bytes=parameters * kv.element_bytes,
        kv_bytes=kv.page_layer_bytes(kv.stored) / BLOCK_TOKENS,
    )
    return Shape(
        name=name,
        parameters=parameters,
        active=met,
        element_bytes=kv.element_bytes,
        weight_bytes=parameters * kv.element_bytes,
        cost=cost,
        kv=kv,
    )


def count(config: ModelConfig) -> int:
    """Parameters of a checkpoint of this shape: those that ``engine.weights.names`` lists."""
    c = config
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = 2 * h * (q + kv) + (q + 2 * kv) * c.qkv_bias + h * c.out_bias
    norms = h * (4 if c.sandwich_norms else 2) + 2 * c.head_dim * c.qk_norm
    dense = 3 * h * c.intermediate_size + (2 * c.intermediate_size + h) * c.mlp_bias
    total = c.layers * (attention + norms) + h + c.vocab_size * h * (1 + (not c.tied_embeddings))
    for layer in range(c.layers):
        if c.moe is not None and c.is_sparse(layer):
            total += c.moe.experts * (3 * h * c.moe.intermediate_size + h)
        else:
            total += dense
    return total
