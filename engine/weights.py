"""Weights from safetensors into the layout that the model multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig
from protocol.errors import StartupError


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Projections are [out, in]; q and k rows are interleaved for rotary pairs."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied

    @property
    def bytes(self) -> int:
        tied = self.head is self.embedding
        tensors = [self.embedding, self.final_norm] + ([] if tied else [self.head])
        for layer in self.layers:
            tensors += list(vars(layer).values())
        return sum(t.numel() * t.element_size() for t in tensors)


Get = Callable[[str, tuple[int, ...]], Tensor]


def interleave_rotary(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from halves (i, i + d/2) to neighbours (2i, 2i + 1).

    Rotary embedding then is one complex product. Queries and keys are permuted alike, so their dot
    products, and with them the model, stay as they are.
    """
    rows, hidden = weight.shape
    dim = rows // heads
    return weight.view(heads, 2, dim // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _layer(get: Get, c: ModelConfig, i: int) -> LayerWeights:
    p = f"model.layers.{i}."
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    return LayerWeights(
        attention_norm=get(p + "input_layernorm.weight", (h,)),
        qkv=torch.cat(
            [
                interleave_rotary(get(p + "self_attn.q_proj.weight", (q, h)), c.heads),
                interleave_rotary(get(p + "self_attn.k_proj.weight", (kv, h)), c.kv_heads),
                get(p + "self_attn.v_proj.weight", (kv, h)),
            ]
        ),
        out=get(p + "self_attn.o_proj.weight", (h, q)),
        mlp_norm=get(p + "post_attention_layernorm.weight", (h,)),
        gate_up=torch.cat(
            [
                get(p + "mlp.gate_proj.weight", (c.intermediate_size, h)),
                get(p + "mlp.up_proj.weight", (c.intermediate_size, h)),
            ]
        ),
        down=get(p + "mlp.down_proj.weight", (h, c.intermediate_size)),
    )


def assemble(
    get: Get, config: ModelConfig, progress: Callable[[float], None] = lambda _: None
) -> Weights:
    """Build the weights from ``get(name, shape)``; reports the fraction done."""
    embedding = get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    layers = []
    for i in range(config.layers):
        layers.append(_layer(get, config, i))
        progress((i + 1) / config.layers)
    head = embedding
    if not config.tied_embeddings:
        head = get("lm_head.weight", (config.vocab_size, config.hidden_size))
    return Weights(embedding, tuple(layers), get("model.norm.weight", (config.hidden_size,)), head)


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda _: None,
) -> Weights:
    """Load ``folder/*.safetensors``, one file or many shards.

    Raises StartupError naming the tensor that is missing or has another shape than expected.
    """
    try:
        files = [
            safe_open(p, framework="pt", device=str(device))
            for p in sorted(folder.glob("*.safetensors"))
        ]
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{folder}: cannot read the weights: {error}") from error
    if not files:
        raise StartupError(f"{folder}: no *.safetensors file; expected the model's weights there")
    holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in holder:
            raise StartupError(f"{folder}: tensor {name} is missing from the weights")
        tensor: Tensor = holder[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(
                f"{folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        return tensor.to(dtype)

    return assemble(get, config, progress)


def names(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a checkpoint of this shape holds, with its shape."""
    wanted: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, shape: tuple[int, ...]) -> Tensor:
        wanted.append((name, shape))
        return torch.empty(shape, device="meta")

    assemble(record, config)
    yield from wanted


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, std: float = 0.05
) -> Weights:
    """Weights drawn from N(0, std^2), norms one: for benchmarks and tests."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def get(_name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=generator, device=device)
        return noise.mul_(std).to(dtype)

    return assemble(get, config)
