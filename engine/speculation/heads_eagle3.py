"""EAGLE-3 heads: what is in a checkpoint, and the head's pass.

    fc.weight [hidden, 3 * hidden]                the inputs of three of the target's layers
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight
    midlayer.self_attn.{q,k,v}_proj.weight [.., 2 * hidden], midlayer.self_attn.o_proj.weight
    midlayer.mlp.{gate,up,down}_proj.weight
    norm.weight, lm_head.weight [draft vocabulary, hidden]
    d2t [draft vocabulary]    by column of the logits, how far its token lies above its index
    t2d, embed_tokens.weight (optional; else the target's)

A feature is fc of the three inputs, in place of the target's output. Attention reads the normed
embedding of token t + 1 beside the normed feature t; the layer's output is the next feature, and
normed, what the head's own reading sees (Li et al. 2025, EAGLE-3, section 3.1). Which layers: 2,
the middle and the last but two, or ``eagle_aux_hidden_state_layer_ids`` in config.json.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import View
from engine.linear import draft_linear, linear
from engine.model import Model
from engine.norm import RmsNorm
from engine.speculation.heads_eagle import check_names, head_config, own_embedding
from engine.speculation.heads_layer import HeadLayer
from engine.speculation.heads_layout import read_settings, refuse_pickles
from engine.weights import Tensors
from protocol.errors import StartupError

_KNOWN = re.compile(
    r"fc\.weight|(midlayer|layers\.0)\.(self_attn|mlp)\..*|(norm|lm_head|embed_tokens)\.weight"
    r"|(midlayer|layers\.0)\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight|d2t|t2d"
)


class Eagle3Head:
    """The head in ``folder``."""

    def __init__(self, model: Model, folder: Path, pages: int, positions: int) -> None:
        """``positions``: of the longest text. Raises StartupError naming what is missing, or does
        not fit the target."""
        refuse_pickles(folder)
        settings = read_settings(folder)
        self.config = c = head_config(folder, model.config)
        self.taps = _taps(settings, model.config.layers, folder)
        h, self.kept = c.hidden_size, len(self.taps) * c.hidden_size
        tensors = Tensors(folder, model.dtype, model.device, finite=True)
        check_names(tensors.names, _KNOWN, folder, "an EAGLE-3 head of one layer")
        published = any(name.startswith("midlayer.") for name in tensors.names)
        module = "midlayer." if published else "layers.0."

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            return tensors(module + name, shape)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors(name, (h,)), c.norm_eps)

        self._join = draft_linear(tensors("fc.weight", (h, self.kept)))
        self._embedding = own_embedding(tensors, "embed_tokens.weight", model)
        self._token_norm = norm(module + "input_layernorm.weight")
        self._feature_norm = norm(module + "hidden_norm.weight")
        self._layer = HeadLayer(get, c, model, pages=pages, positions=positions, inputs=2)
        self._norm = norm("norm.weight")
        columns = int(settings.get("draft_vocab_size") or c.vocab_size)
        self._reading = linear(tensors("lm_head.weight", (columns, h)))
        self.tokens = _tokens(tensors, columns, c.vocab_size, folder)

    def features(self, kept: Tensor) -> Tensor:
        return self._join(kept)

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, view: View
    ) -> Tensor:
        embedded = self._token_norm(F.embedding(tokens, self._embedding))
        x = torch.cat((embedded, self._feature_norm(features)), -1)
        return self._layer(x, features, positions, slots, view)

    def read(self, features: Tensor) -> Tensor:
        return self._reading(self._norm(features)).float()


def _taps(settings: dict[str, Any], layers: int, folder: Path) -> tuple[int, ...]:
    """Raises StartupError for layers that the target does not have."""
    name = "eagle_aux_hidden_state_layer_ids"
    given = settings.get(name) or (settings.get("eagle_config") or {}).get(name)
    taps = tuple(given) if given else (2, layers // 2, layers - 3)
    fit = len(taps) == 3 and all(isinstance(i, int) and 0 <= i < layers for i in taps)
    if not fit or list(taps) != sorted(set(taps)):
        raise StartupError(
            f"{folder}: an EAGLE-3 head sees the inputs of three layers, in ascending order; of a"
            f" target of {layers} layers it cannot see {list(taps)}"
        )
    return taps


def _tokens(tensors: Tensors, columns: int, vocab: int, folder: Path) -> Tensor | None:
    """The token that each column of the logits stands for; None: its own index."""
    if "d2t" not in tensors.names:
        if columns != vocab:
            raise StartupError(f"{folder}: tensor d2t is missing; lm_head reads {columns} tokens")
        return None
    above = tensors.stored("d2t", (columns,)).long()
    tokens = torch.arange(columns, device=above.device) + above
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise StartupError(f"{folder}: d2t leads beyond the vocabulary of {vocab} tokens")
    return tokens
