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


class Copying:
    """The tensors of such a model, of any shape (untied embeddings), made when they are asked for;
    in fp32 on ``device``."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        assert not config.tied_embeddings
        self._config, self._device = config, device
        self._generator = torch.Generator(device=device).manual_seed(0)
        codes = torch.Generator().manual_seed(1)
        bits = torch.randint(0, 2, (config.vocab_size, CODE), generator=codes)
        self._codes = (bits * 2.0 - 1).to(device)
        # What the norm of the first layer divides by.
        self._rms = math.sqrt((CODE + ONE**2) / config.hidden_size)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._idle(name, shape)
        if name == "model.embed_tokens.weight":
            tensor = torch.zeros_like(tensor)
            tensor[:, TOKEN : TOKEN + CODE], tensor[:, CONSTANT] = self._codes, ONE
        elif name == "lm_head.weight":
            tensor = torch.zeros_like(tensor)
            tensor[:, SAYS : SAYS + CODE] = self._codes
        elif name.startswith("model.layers.0.self_attn."):
            self._copy_(name, tensor)
        return tensor

    def _idle(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """So that no layer adds anything."""
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.zeros(shape, device=self._device)
        return torch.randn(shape, generator=self._generator, device=self._device).mul_(STD)

    def _copy_(self, name: str, tensor: Tensor) -> None:
        """Head 0 of layer 0 reads the token to say."""
        c, unit = self._config, self._rms / ONE  # times the constant channel: 1
        half, eye = c.head_dim // 2, torch.eye(CODE, device=self._device)
        if name.endswith("o_proj.weight"):
            tensor[SAYS : SAYS + CODE, :CODE] = eye
            return
        head = tensor[: c.head_dim].zero_()
        if name.endswith("q_proj.weight"):
            turn = torch.arange(half, device=self._device) / half
            angle = (PERIOD - 1) * c.rope.theta**-turn
            gain = SCORE * math.sqrt(c.head_dim) * unit
            head[:half, CONSTANT], head[half:, CONSTANT] = gain * angle.cos(), -gain * angle.sin()
        elif name.endswith("k_proj.weight"):
            head[:half, CONSTANT] = unit
        else:
            head[:CODE, TOKEN : TOKEN + CODE] = eye * self._rms


def make_copying(source: Path, folder: Path, shape: dict[str, int]) -> Path:
    """Write a model of ``shape`` with the tokenizer of the model in ``source``, in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    raw = json.loads((source / "config.json").read_text())
    raw.update(shape, tie_word_embeddings=False, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))
    c = load_config(folder)
    make = Copying(c, torch.device("cpu"))
    tensors = {name: make(name, size) for name, size in names(c)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
