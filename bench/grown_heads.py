"""Medusa and EAGLE heads grown along with their target (bench/grown_model.py): they say the same as
before, and cost what heads of a target of that shape do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.grown_model import Grower, write_config
from engine.checkpoint import load_config

Tensors = Mapping[str, Tensor]


def grow_heads(heads: Path, folder: Path, shape: dict[str, int]) -> Path:
    """Write to ``folder`` the heads in ``heads`` for a target that was grown to ``shape``, fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in heads.glob("*.json"):
        shutil.copy(path, folder / path.name)
    tensors = {name: t.float() for name, t in load_file(heads / "model.safetensors").items()}
    wide = shape["hidden_size"]
    if "fc.weight" in tensors:
        write_config(heads, folder, {**shape, "num_hidden_layers": 1})
        grower = Grower(load_config(heads), load_config(folder))
        out = dict(_eagle(grower, tensors, wide))
    else:
        out = dict(_medusa(tensors, wide))
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _medusa(tensors: Tensors, wide: int) -> Iterator[tuple[str, Tensor]]:
    """Blocks [hidden, hidden] and their biases, and readings [vocab, hidden]."""
    vocab = max(len(t) for t in tensors.values())
    for name, t in tensors.items():
        grown = torch.zeros(len(t) if len(t) == vocab else wide, *[wide] * (t.dim() - 1))
        grown[tuple(slice(size) for size in t.shape)] = t
        yield name, grown


def _eagle(grower: Grower, tensors: Tensors, wide: int) -> Iterator[tuple[str, Tensor]]:
    layer = "layers.0."
    fc = tensors["fc.weight"]
    hidden = len(fc)
    grown = torch.zeros(wide, 2 * wide)
    grown[:hidden, :hidden], grown[:hidden, wide : wide + hidden] = fc.chunk(2, dim=1)
    yield "fc.weight", grown
    if "fc.bias" in tensors:
        yield "fc.bias", torch.nn.functional.pad(tensors["fc.bias"], (0, wide - hidden))
    if "embed_tokens.weight" in tensors:
        yield "embed_tokens.weight", grower.embedding(tensors["embed_tokens.weight"])
    for name, t in grower.layer(lambda name: tensors[layer + name]):
        yield layer + name, t
    norm = layer + "post_attention_layernorm.weight"
    yield norm, grower.norm(tensors[norm])
