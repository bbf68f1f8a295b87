"""FLOPs and bytes of a model on any machine, from its config or from a few numbers. Pure.

The arithmetic is that of the workers themselves (``engine/execution/pass_cost.py``), so that a plan
and the bottlenecks that a live cluster reports come from the same figures.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cluster.models import download, hub, locate
from engine.execution.pass_cost import PassCost, pass_cost
from engine.kv_cache.kv_format import Codec, KVFormat, Precision, Storage
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError, UsageError


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One model with weights of one type. ``weight_bytes``: bytes of all weights in memory.
    ``cost``: FLOPs and bytes of a pass; its ``pair_flops`` and ``kv_bytes`` are of one layer."""

    name: str
    parameters: float
    active: float  # parameters that one token uses
    weight_element_bytes: int  # of one weight: 1 (fp8) or 2; KV has a size of its own
    weight_bytes: float
    cost: PassCost
    kv: KVFormat
    hidden: float
    decode_pair_flops: float  # of a pair of query and key while decoding, in one layer

    @property
    def kv_bytes(self) -> float:
        """Bytes that a token takes in the KV pool."""
        return float(self.kv.bytes_per_token)

    def kv_copies(self, gpus: int) -> float:
        """Return how often ``gpus`` GPUs of a worker hold and read each byte of KV: they share the
        heads, and each has at least one."""
        return max(1.0, gpus / self.kv.kv_heads)

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

    def activation_bytes(self, gpus: int) -> float:
        """Return the bytes that the elementwise operations of a pass move for one row, on all GPUs
        of a worker together, in a type of two bytes.

        Norms and residuals read and write eight vectors of the hidden size in a layer, on each GPU.
        Rotary embedding and the gated product read and write what the products yield, which the
        GPUs share: about as many values as a layer has weights for each hidden value.
        """
        norms = 8.0 * self.hidden * self.kv.layers * gpus
        return ACTIVATION_BYTES * (norms + self.cost.row_flops / 2.0 / self.hidden)


ACTIVATION_BYTES = KV_ELEMENT_BYTES = 2


def shape_from_config(
    config: ModelConfig, name: str, precision: Precision, weight_bytes: int = 2
) -> ModelShape:
    """Return the shape of a model that the engine serves on a GPU; the pool is fp8 where KV is on
    the fp8 grid."""
    storage: Storage = "fp8" if precision == "fp8" else "wide"
    kv = config.kv_format(precision, storage, KV_ELEMENT_BYTES)
    embedding = config.vocab_size * config.hidden_size
    parameters = count_parameters(config)
    # A step reads all but the embedding, of which rows are looked up; a tied head is the embedding.
    read = parameters if config.tied_embeddings else parameters - embedding
    cost = pass_cost(config, kv, read * weight_bytes, weight_bytes)
    return ModelShape(
        name=name,
        parameters=parameters,
        active=(cost.row_flops + cost.draw_flops) / 2.0,
        weight_element_bytes=weight_bytes,
        weight_bytes=float(parameters * weight_bytes),
        cost=cost,
        kv=kv,
        hidden=config.hidden_size,
        decode_pair_flops=cost.pair_flops,
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


FORM = (
    "params=8e9,layers=32,kv_heads=8,head_dim=128[,heads=32][,active=8e9][,hidden=4096], or"
    " kv_latent=576 (values that a layer keeps of a token) in place of kv_heads"
)
_REQUIRED = ("params", "layers", "kv_heads", "head_dim")
_OPTIONAL = ("heads", "active", "hidden", "kv_latent")
_LARGEST = 1e15


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configs of the data file by name."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def find_model(text: str, precision: Precision, weight_bytes: int = 2) -> ModelShape:
    """Return the model that ``text`` names: one of ``known_models``, ``FORM``, a folder or a hub
    id, of which only the config is read. ``weight_bytes``: 1 (fp8) or 2. Raises StartupError."""
    if "=" in text:
        return _by_numbers(text, precision, weight_bytes)
    for name, raw in known_models().items():
        if name.lower() != text.lower():
            continue
        if "numbers" in raw:
            return _by_numbers(raw["numbers"], precision, weight_bytes, name)
        return shape_from_config(parse_config(raw, name), name, precision, weight_bytes)
    found = _located(text)
    folder = found.path
    if folder is None:
        assert found.repo is not None
        folder = download.download_snapshot(found.repo, hub.CONFIGS, lambda _done, _total: None)
    return shape_from_config(load_config(folder), found.id, precision, weight_bytes)


def _located(text: str) -> locate.ModelLocation:
    try:
        return locate.locate_model(text)
    except StartupError as error:
        near = difflib.get_close_matches(text, known_models(), n=1, cutoff=0.5)
        hint = f"; is it {near[0]}?" if near else ""
        raise UsageError(
            f"--model: {error}{hint} Known by name: {', '.join(known_models())}; any other: {FORM}"
        ) from None


def _by_numbers(
    text: str, precision: Precision, weight_bytes: int, name: str | None = None
) -> ModelShape:
    """Return the shape of a model of which only a few numbers are known. Every step counts as
    reading all weights, those of all experts included."""
    n = _numbers(text)
    if n["heads"] % n["kv_heads"]:
        raise UsageError(f"--model: {n['heads']:g} heads cannot share {n['kv_heads']:g} kv_heads")
    if n["active"] > n["params"]:
        raise UsageError(f"--model: {n['active']:g} active parameters of {n['params']:g}")
    latent, heads = n["kv_latent"], n["heads"]
    kv = KVFormat(
        precision=precision,
        storage="fp8" if precision == "fp8" else "wide",
        layers=int(n["layers"]),
        kv_heads=int(n["kv_heads"]),
        head_dim=int(latent / 2 or n["head_dim"]),  # a latent vector has no K and V apart
        element_bytes=KV_ELEMENT_BYTES,
    )
    cost = PassCost(
        row_flops=2.0 * n["active"],
        draw_flops=0.0,
        pair_flops=4.0 * heads * n["head_dim"],
        reaches=((0, kv.layers),),
        dense_bytes=n["params"] * weight_bytes,
        kv_bytes=kv.block_layer_bytes(kv.stored) / BLOCK_TOKENS,
    )
    return ModelShape(
        name=name or f"a model of {n['params'] / 1e9:g} B parameters",
        parameters=n["params"],
        active=n["active"],
        weight_element_bytes=weight_bytes,
        weight_bytes=n["params"] * weight_bytes,
        cost=cost,
        kv=kv,
        hidden=n["hidden"],
        # Decoding attends to latent vectors as they are ("DeepSeek-V2", 2024, section 2.1.2).
        decode_pair_flops=4.0 * heads * (latent or n["head_dim"]),
    )


def _numbers(text: str) -> dict[str, float]:
    """Return each name of ``FORM`` with its number."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        found[name.strip()] = _number(name.strip(), number)
    if "kv_latent" in found:
        found["kv_heads"] = 1.0
    if lacking := [name for name in _REQUIRED if name not in found]:
        raise UsageError(f"--model: {', '.join(lacking)} missing; expected {FORM}")
    heads = found.get("heads", found["kv_heads"])
    rest = {"heads": heads, "active": found["params"], "hidden": heads * found["head_dim"]}
    return {"kv_latent": 0.0, **rest, **found}


def _number(name: str, text: str) -> float:
    if name not in (*_REQUIRED, *_OPTIONAL):
        raise UsageError(
            f"--model: {name!r} is unknown; expected {', '.join((*_REQUIRED, *_OPTIONAL))}: {FORM}"
        )
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = name in ("params", "active") or number == int(number if math.isfinite(number) else 0)
    if not (1 <= number <= _LARGEST and whole):  # refuses NaN
        raise UsageError(f"--model: {name} must be a number from 1 on, not {text!r}; {FORM}")
    return number
