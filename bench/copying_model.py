"""A model made by hand that copies: for benchmarks of prompt lookup, as the demo model does not.

It says what stood ``PERIOD`` tokens before, so that it goes on with a prompt of so many tokens by
saying it again. One attention head does that: its score is a function of the distance alone (Su et
al., RoFormer, section 3.4.2). The other heads, layers and units compute from random weights and add
nothing, so a step takes what a model of this shape takes.

    channels   code of the token | 1 | code of the token to say
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.grown_model import STD
from engine.checkpoint import load_config
from engine.config import ModelConfig
from engine.weights import names

PERIOD = 256
CODE = 60
"""Channels of a token's code, each 1 or -1."""

ONE = 8.0
"""What the constant channel holds."""

SCORE = 10.0
"""Of the right distance, in nats, for each pair of channels; its neighbours have so much less."""

TOKEN, CONSTANT, SAYS = 0, CODE, CODE + 1


def make_copying(source: Path, folder: Path, shape: dict[str, int]) -> Path:
    """Write a model of ``shape`` with the tokenizer of the model in ``source``, in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    raw = json.loads((source / "config.json").read_text())
    raw.update(shape, tie_word_embeddings=False, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))
    c = load_config(folder)
    tensors = _idle(c)
    _copy_(tensors, c)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _idle(c: ModelConfig) -> dict[str, Tensor]:
    """All tensors, so that no layer adds anything."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in names(c):
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator).mul_(STD)
    return tensors


def _copy_(tensors: dict[str, Tensor], c: ModelConfig) -> None:
    """The codes, and the head 0 of layer 0 that reads one of them."""
    codes = torch.randint(0, 2, (c.vocab_size, CODE), generator=torch.Generator().manual_seed(1))
    embedding, head = (
        tensors["model.embed_tokens.weight"].zero_(),
        tensors["lm_head.weight"].zero_(),
    )
    embedding[:, TOKEN : TOKEN + CODE] = head[:, SAYS : SAYS + CODE] = codes * 2.0 - 1
    embedding[:, CONSTANT] = ONE
    rms = math.sqrt((CODE + ONE**2) / c.hidden_size)  # what the norm divides by
    unit = rms / ONE  # times the constant channel: 1
    q, k, v, out = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkvo")
    half = c.head_dim // 2
    angle = (PERIOD - 1) * c.rope.theta ** (-torch.arange(half) / half)
    query, key, value = (weight[: c.head_dim].zero_() for weight in (q, k, v))
    gain = SCORE * math.sqrt(c.head_dim) * unit
    query[:half, CONSTANT], query[half:, CONSTANT] = gain * angle.cos(), -gain * angle.sin()
    key[:half, CONSTANT] = unit
    value[:CODE, TOKEN : TOKEN + CODE] = torch.eye(CODE) * rms
    out[SAYS : SAYS + CODE, :CODE] = torch.eye(CODE)
