"""A model made by hand that repeats its prompt, for benchmarks of prompt lookup.

Its next token is the one ``PERIOD`` tokens before, so that it continues a prompt of that length by
repeating it. One attention head does that: its score is a function of the distance alone (Su et
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

from bench.speculation.grown_model import STD
from engine.model.weights import tensor_shapes
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig

PERIOD = 256
CODE = 60
"""Number of channels of a token's code, each 1 or -1."""

ONE = 8.0
"""Value of the constant channel."""

SCORE = 10.0
"""Attention score in nats of the right distance over its neighbours, per pair of channels."""

TOKEN, CONSTANT, SAYS = 0, CODE, CODE + 1


class CopyingWeights:
    """Makes the tensors of a copying model of any shape (untied embeddings), fp32 on ``device``.

    Calling it with a name and a shape returns a tensor of that shape.
    """

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
        """Make a random tensor of ``shape``, with zeros where a layer would add to the output."""
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.zeros(shape, device=self._device)
        return torch.randn(shape, generator=self._generator, device=self._device).mul_(STD)

    def _copy_(self, name: str, tensor: Tensor) -> None:
        """Write the projections of layer 0 so that its head 0 reads the token to repeat."""
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
    """Write a model of ``shape`` in fp32, with the tokenizer of the model in ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    raw = json.loads((source / "config.json").read_text())
    raw.update(shape, tie_word_embeddings=False, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))
    c = load_config(folder)
    make = CopyingWeights(c, torch.device("cpu"))
    tensors = {name: make(name, size) for name, size in tensor_shapes(c)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
