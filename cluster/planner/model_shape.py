"""FLOPs and bytes of a model on any machine, from its config or from a few numbers. Pure.

The arithmetic is that of the workers themselves (``machine_costs.py``), so that a plan and the
bottlenecks that a live cluster reports come from the same figures.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cluster.models import download, hub, locate
from engine.execution.pass_cost import PassCost, pass_cost
from engine.kv_cache.kv_format import Codec, KVFormat, Precision
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError


class PassWork(NamedTuple):
    """FLOPs and bytes of one forward pass: products with weights, and attention."""

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


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one data type. ``weight_bytes``: bytes of all weights in memory. ``cost``: FLOPs
    and bytes of a pass; its ``pair_flops`` and ``kv_bytes`` are of one layer."""

    name: str
    parameters: float
    active: float  # parameters that one token uses
    element_bytes: int
    weight_bytes: float
    cost: PassCost
    kv: KVFormat

    @property
    def kv_bytes(self) -> float:
        """Bytes that a token takes in the KV pool."""
        return float(self.kv.bytes_per_token)

    def wire_bytes(self, codec: Codec) -> float:
        """Return the bytes of a token's KV on the wire."""
        return self.kv.layers * self.kv.block_layer_bytes(codec) / BLOCK_TOKENS

    @property
    def codec(self) -> Codec:
        """The codec that ``auto`` selects among those that change no value. It is the one with the
        fewest bytes: pools of a plan store fp8 where they can, so that it also takes the cheapest
        copies."""
        return min(self.kv.codecs, key=self.kv.block_layer_bytes)

    def reached(self, context: float) -> float:
        """Return the tokens that a query attends to after ``context`` others, summed over the
        layers."""
        return sum(
            count * (min(context, window) if window else context)
            for window, count in self.cost.reaches
        )

    def decode(self, batch: float, context: float) -> PassWork:
        """Return the work of a step that decodes ``batch`` sequences of ``context`` tokens each:
        weights are read once, KV once for each sequence."""
        reached = batch * self.reached(context)
        return PassWork(
            batch * (self.cost.row_flops + self.cost.draw_flops),
            reached * self.cost.pair_flops,
            self.cost.weight_bytes(max(1, round(batch))),
            reached * self.cost.kv_bytes,
        )

    def prompt(self, cached: float, tokens: float) -> PassWork:
        """Return the work of a pass over ``tokens`` tokens after ``cached`` ones (Pope et al.,
        2022, section 2)."""
        return PassWork(
            tokens * self.cost.row_flops + self.cost.draw_flops,
            tokens * self.reached(cached + tokens / 2) * self.cost.pair_flops,
            self.cost.weight_bytes(max(1, round(tokens))),
            self.reached(cached + tokens) * self.cost.kv_bytes,
        )


def shape_from_config(
    config: ModelConfig, name: str, precision: Precision, element_bytes: int = 2
) -> ModelShape:
    """Return the shape of a model that the engine serves on a GPU; the pool is fp8 where KV is on
    the fp8 grid."""
    kv = config.kv_format(precision, "fp8" if precision == "fp8" else "wide", element_bytes)
    embedding = config.vocab_size * config.hidden_size
    parameters = count_parameters(config)
    # A step reads all but the embedding, of which rows are looked up; a tied head is the embedding.
    read = parameters if config.tied_embeddings else parameters - embedding
    cost = pass_cost(config, kv, read * element_bytes, element_bytes)
    return ModelShape(
        name=name,
        parameters=parameters,
        active=(cost.row_flops + cost.draw_flops) / 2.0,
        element_bytes=element_bytes,
        weight_bytes=float(parameters * element_bytes),
        cost=cost,
        kv=kv,
    )


def shape_from_numbers(
    name: str,
    parameters: float,
    kv: KVFormat,
    *,
    active: float | None = None,
    heads: int | None = None,
) -> ModelShape:
    """Return the shape of a dense model, or of a sparse one of whose parameters a token uses
    ``active``: every step then counts as reading all experts. ``heads``: query heads, None: as many
    as KV heads."""
    used = parameters if active is None else active
    cost = PassCost(
        row_flops=2.0 * used,
        draw_flops=0.0,
        pair_flops=4.0 * (heads or kv.kv_heads) * kv.head_dim,
        reaches=((0, kv.layers),),
        dense_bytes=parameters * kv.element_bytes,
        kv_bytes=kv.block_layer_bytes(kv.stored) / BLOCK_TOKENS,
    )
    return ModelShape(
        name=name,
        parameters=parameters,
        active=used,
        element_bytes=kv.element_bytes,
        weight_bytes=parameters * kv.element_bytes,
        cost=cost,
        kv=kv,
    )


def count_parameters(config: ModelConfig) -> int:
    """Return the parameters of a checkpoint of this shape: those that
    ``engine.model.weights.names`` lists."""
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


FORM = "params=8e9,layers=32,kv_heads=8,head_dim=128[,heads=32][,active=8e9]"
_REQUIRED = ("params", "layers", "kv_heads", "head_dim")
_OPTIONAL = ("heads", "active")
_LARGEST = 1e15


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configs of the data file by name."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def find_model(text: str, precision: Precision, element_bytes: int = 2) -> ModelShape:
    """Return the model that ``text`` names: one of ``known_models``, ``FORM``, a folder or a hub
    id, of which only the config is read. Raises StartupError."""
    if "=" in text:
        return _by_numbers(text, precision, element_bytes)
    for name, raw in known_models().items():
        if name.lower() == text.lower():
            return shape_from_config(parse_config(raw, name), name, precision, element_bytes)
    found = _located(text)
    folder = found.path
    if folder is None:
        assert found.repo is not None
        folder = download.download_snapshot(found.repo, hub.CONFIGS, lambda _done, _total: None)
    return shape_from_config(load_config(folder), found.id, precision, element_bytes)


def _located(text: str) -> locate.ModelLocation:
    try:
        return locate.locate_model(text)
    except StartupError as error:
        near = difflib.get_close_matches(text, known_models(), n=1, cutoff=0.5)
        hint = f"; is it {near[0]}?" if near else ""
        raise StartupError(
            f"--model: {error}{hint} Known by name: {', '.join(known_models())}; any other: {FORM}"
        ) from None


def _by_numbers(text: str, precision: Precision, element_bytes: int) -> ModelShape:
    numbers = _numbers(text)
    if numbers["heads"] % numbers["kv_heads"]:
        raise StartupError(
            f"--model: {numbers['heads']:g} heads cannot share {numbers['kv_heads']:g} kv_heads"
        )
    if numbers["active"] > numbers["params"]:
        raise StartupError(
            f"--model: {numbers['active']:g} active parameters of {numbers['params']:g}"
        )
    kv = KVFormat(
        precision=precision,
        storage="fp8" if precision == "fp8" else "wide",
        layers=int(numbers["layers"]),
        kv_heads=int(numbers["kv_heads"]),
        head_dim=int(numbers["head_dim"]),
        element_bytes=element_bytes,
    )
    name = f"a model of {numbers['params'] / 1e9:g} B parameters"
    heads = int(numbers["heads"])
    return shape_from_numbers(name, numbers["params"], kv, active=numbers["active"], heads=heads)


def _numbers(text: str) -> dict[str, float]:
    """Return each name of ``FORM`` with its number."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        found[name.strip()] = _number(name.strip(), number)
    if lacking := [name for name in _REQUIRED if name not in found]:
        raise StartupError(f"--model: {', '.join(lacking)} missing; expected {FORM}")
    return {"heads": found["kv_heads"], "active": found["params"], **found}


def _number(name: str, text: str) -> float:
    if name not in (*_REQUIRED, *_OPTIONAL):
        raise StartupError(
            f"--model: {name!r} is none of {', '.join((*_REQUIRED, *_OPTIONAL))}: {FORM}"
        )
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = name in ("params", "active") or number == int(number if math.isfinite(number) else 0)
    if not (1 <= number <= _LARGEST and whole):  # refuses NaN
        raise StartupError(f"--model: {name} must be a number from 1 on, not {text!r}; {FORM}")
    return number
