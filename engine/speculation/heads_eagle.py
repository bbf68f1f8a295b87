"""An EAGLE head: what is in a checkpoint, and the pass of its one layer.

    fc.weight [hidden, 2 * hidden], fc.bias (optional)
    layers.0.self_attn.{q,k,v,o}_proj.*, layers.0.mlp.{gate,up,down}_proj.*
    layers.0.post_attention_layernorm.weight
    embed_tokens.weight (optional; else the target's)       lm_head.weight (the target's is used)

The layer takes fc([embedding of token t + 1 | feature t]), with no norm before its attention, and
yields feature t + 1, which the target's head reads (Li et al. 2024, EAGLE, section 4.1; EAGLE-2,
section 4, has the same head). A feature is what the target's head sees, after the final norm.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import attend
from engine.batch import View
from engine.checkpoint import load_config
from engine.config import ModelConfig
from engine.kv_pool import make_pool
from engine.layers import dense, projections
from engine.linear import Linear, draft_linear
from engine.model import Model
from engine.norm import RmsNorm
from engine.rotary import rotary_table, rotate_
from engine.speculation.heads_layout import refuse_pickles
from engine.weights import Tensors
from protocol.errors import StartupError

_KNOWN = re.compile(
    r"(model\.)?(fc\.(weight|bias)|embed_tokens\.weight|layers\.0\.(self_attn|mlp)\..*"
    r"|layers\.0\.post_attention_layernorm\.weight)|lm_head\.weight"
)


class EagleHead:
    """The head in ``folder``, with KV of its own on the page numbers of the target's pool."""

    def __init__(self, model: Model, folder: Path, pages: int, positions: int) -> None:
        """``positions``: of the longest text. Raises StartupError naming what is missing, or does
        not fit the target."""
        refuse_pickles(folder)
        self.config = c = load_config(folder)
        _check(c, model.config, folder)
        tensors = Tensors(folder, model.dtype, model.device)
        unknown = sorted(name for name in tensors.names if not _KNOWN.fullmatch(name))
        if unknown:
            raise StartupError(
                f"{folder}: tensor {unknown[0]} is none of an EAGLE-1 or EAGLE-2 head of one layer"
            )
        prefix = "model." if "model.fc.weight" in tensors.names else ""

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            return tensors(prefix + name, shape)

        self._join = _join(tensors, prefix, c.hidden_size)
        self._embedding = _embedding(tensors, prefix, model)
        self._qkv, self._out = projections(get, c, "layers.0.self_attn.", draft_linear)
        norm = get("layers.0.post_attention_layernorm.weight", (c.hidden_size,))
        self._mlp_norm = RmsNorm(norm, c.norm_eps)
        self._mlp = dense(get, c, "layers.0.mlp.", draft_linear)
        self._turns = rotary_table(c.rope, c.head_dim, positions, model.device)
        format_ = c.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, view: View
    ) -> Tensor:
        """The features [T, hidden] after ``tokens`` [T], each given the one before its token.

        positions, slots: [T] of the tokens; their KV is in the pool afterwards. All rows are decode
        rows of ``view``."""
        c, rows = self.config, len(tokens)
        x = self._join(torch.cat((F.embedding(tokens, self._embedding), features), -1))
        heads = self._qkv(x).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        rotate_(heads[:, : c.heads + c.kv_heads], self._turns[positions][:, None])
        self._pool.store(0, slots, kv)
        out = torch.empty_like(q)
        attend(q, kv, self._pool.layer(0), view, out, scale=c.attention_scale, softcap=0.0)
        x = self._out.add(out.flatten(1), x)
        return self._mlp.add(self._mlp_norm(x), x)


def _check(c: ModelConfig, target: ModelConfig, folder: Path) -> None:
    """Raises StartupError where the head is not one for the target."""
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(c, name), getattr(target, name)
        if own != wanted:
            raise StartupError(
                f"{folder}: config.json has {name} {own}, but that of the target is {wanted}"
            )
    if c.layers != 1 or c.architecture != "LlamaForCausalLM":
        raise StartupError(
            f"{folder}: an EAGLE head of {c.layers} layers ({c.architecture}) is not supported;"
            " expected one layer (LlamaForCausalLM)"
        )


def _join(tensors: Tensors, prefix: str, hidden: int) -> Linear:
    bias = prefix + "fc.bias"
    return draft_linear(
        tensors(prefix + "fc.weight", (hidden, 2 * hidden)),
        tensors(bias, (hidden,)) if bias in tensors.names else None,
    )


def _embedding(tensors: Tensors, prefix: str, model: Model) -> Tensor:
    """Its own where it has one that is not the target's."""
    name, shared = prefix + "embed_tokens.weight", model.weights.embedding
    if name not in tensors.names:
        return shared
    own = tensors(name, tuple(shared.shape))
    return shared if torch.equal(own, shared) else own
