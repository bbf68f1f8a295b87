"""EAGLE-1 and EAGLE-2 heads, which are alike: what is in a checkpoint, and the head's pass.

    fc.weight [hidden, 2 * hidden], fc.bias (optional)
    layers.0.self_attn.{q,k,v,o}_proj.*, layers.0.mlp.{gate,up,down}_proj.*
    layers.0.post_attention_layernorm.weight
    embed_tokens.weight (optional; else the target's)       lm_head.weight (the target's is used)

The layer takes fc([embedding of token t + 1 | feature t]), with no norm before its attention, and
yields feature t + 1, which the target's head reads (Li et al. 2024, EAGLE, section 4.1; EAGLE-2,
section 4). A feature is what the target's head sees, after the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.batch import AttentionMetadata
from engine.model.decoder import DecoderModel
from engine.model.linear import Linear, make_draft_linear, make_linear
from engine.model.norm_rotary import RmsNorm
from engine.model.weights import CheckpointTensors
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from engine.speculation.draft_source import read_head_config, refuse_pickles
from engine.speculation.proposers.eagle_layer import HeadLayer
from protocol.errors import StartupError

EAGLE_TENSORS = re.compile(
    r"(model\.)?(fc\.(weight|bias)|embed_tokens\.weight|layers\.0\.(self_attn|mlp)\..*"
    r"|layers\.0\.post_attention_layernorm\.weight)|lm_head\.weight"
)


class AnyEagleHead(Protocol):
    """An EAGLE head of any kind. What it keeps of a token, it makes a feature of; its pass takes a
    token and the feature before it to the next feature; and from that it reads logits."""

    config: ModelConfig
    taps: tuple[int, ...]  # layers of the target whose inputs are kept; empty: its output is
    kept: int  # elements that are kept of a token
    tokens: Tensor | None  # what the columns of its logits stand for; None: for their indices

    def features(self, kept: Tensor) -> Tensor:
        """Of what the target made of tokens, [T, kept]: [T, hidden]."""

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionMetadata,
    ) -> Tensor:
        """The features [T, hidden] after ``tokens`` [T], each given the one before its token.

        positions, slots: [T] of the tokens; their KV is in the pool afterwards. All rows are decode
        rows of ``view``."""

    def read(self, features: Tensor) -> Tensor:
        """Logits [T, tokens] in fp32."""


class EagleHead:
    """The head in ``folder``."""

    taps: tuple[int, ...] = ()
    tokens: Tensor | None = None

    def __init__(self, model: DecoderModel, folder: Path, pages: int, positions: int) -> None:
        """``positions``: of the longest text. Raises StartupError naming what is missing, or does
        not fit the target."""
        refuse_pickles(folder)
        self.config = c = load_head_config(folder, model.config)
        self._model, self.kept = model, c.hidden_size
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        check_tensor_names(
            tensors.names, EAGLE_TENSORS, folder, "an EAGLE-1 or EAGLE-2 head of one layer"
        )
        prefix = "model." if "model.fc.weight" in tensors.names else ""

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            return tensors(f"{prefix}layers.0.{name}", shape)

        self._join = _join(tensors, prefix, c.hidden_size)
        self._embedding = load_head_embedding(tensors, prefix + "embed_tokens.weight", model)
        self._layer = HeadLayer(get, c, model, pages=pages, positions=positions)

    def features(self, kept: Tensor) -> Tensor:
        return self._model.weights.final_norm(kept)

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionMetadata,
    ) -> Tensor:
        x = self._join(torch.cat((F.embedding(tokens, self._embedding), features), -1))
        return self._layer(x, x, positions, slots, view)

    def read(self, features: Tensor) -> Tensor:
        return self._model.lm_head(features)


def load_head_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """Of the head's layer. Raises StartupError where there is none, or the head is none for the
    target."""
    path = folder / "config.json"
    try:
        c = parse_config(
            {**read_head_config(folder), "architectures": ["LlamaForCausalLM"]}, str(path)
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StartupError(f"{path}: not a usable config of a head: {error!r}") from error
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(c, name), getattr(target, name)
        if own != wanted:
            raise StartupError(f"{path} has {name} {own}, but that of the target is {wanted}")
    if c.layers != 1:
        raise StartupError(f"{path}: an EAGLE head of {c.layers} layers is not supported, only 1")
    return c


def check_tensor_names(
    names: Collection[str], known: re.Pattern[str], folder: Path, expected: str
) -> None:
    """Raises StartupError for a tensor that is none of the head's."""
    unknown = sorted(name for name in names if not known.fullmatch(name))
    if unknown:
        raise StartupError(f"{folder}: tensor {unknown[0]} is none of {expected}")


def load_head_embedding(tensors: CheckpointTensors, name: str, model: DecoderModel) -> Tensor:
    """Its own where it has one that is not the target's."""
    shared = model.weights.embedding
    if name not in tensors.names:
        return shared
    own = tensors(name, tuple(shared.shape))
    return shared if torch.equal(own, shared) else own


def _join(tensors: CheckpointTensors, prefix: str, hidden: int) -> Linear:
    bias = prefix + "fc.bias"
    return make_draft_linear(
        tensors(prefix + "fc.weight", (hidden, 2 * hidden)),
        tensors(bias, (hidden,)) if bias in tensors.names else None,
    )


# MERGED engine.speculation.heads_eagle3
# EAGLE-3 heads: what is in a checkpoint, and the head's pass.
#
#     fc.weight [hidden, 3 * hidden]                the inputs of three of the target's layers
#     midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight
#     midlayer.self_attn.{q,k,v}_proj.weight [.., 2 * hidden], midlayer.self_attn.o_proj.weight
#     midlayer.mlp.{gate,up,down}_proj.weight
#     norm.weight, lm_head.weight [draft vocabulary, hidden]
#     d2t [draft vocabulary]    by column of the logits, how far its token lies above its index
#     t2d, embed_tokens.weight (optional; else the target's)
#
# A feature is fc of the three inputs, in place of the target's output. Attention reads the normed
# embedding of token t + 1 beside the normed feature t; the layer's output is the next feature, and
# normed, what the head's own reading sees (Li et al. 2025, EAGLE-3, section 3.1). Which layers: 2,
# the middle and the last but two, or ``eagle_aux_hidden_state_layer_ids`` in config.json.

EAGLE3_TENSORS = re.compile(
    r"fc\.weight|(midlayer|layers\.0)\.(self_attn|mlp)\..*|(norm|lm_head|embed_tokens)\.weight"
    r"|(midlayer|layers\.0)\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight|d2t|t2d"
)


class Eagle3Head:
    """The head in ``folder``."""

    def __init__(self, model: DecoderModel, folder: Path, pages: int, positions: int) -> None:
        """``positions``: of the longest text. Raises StartupError naming what is missing, or does
        not fit the target."""
        refuse_pickles(folder)
        settings = read_head_config(folder)
        self.config = c = load_head_config(folder, model.config)
        self.taps = _taps(settings, model.config.layers, folder)
        h, self.kept = c.hidden_size, len(self.taps) * c.hidden_size
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        check_tensor_names(tensors.names, EAGLE3_TENSORS, folder, "an EAGLE-3 head of one layer")
        published = any(name.startswith("midlayer.") for name in tensors.names)
        module = "midlayer." if published else "layers.0."

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            return tensors(module + name, shape)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors(name, (h,)), c.norm_eps)

        self._join = make_draft_linear(tensors("fc.weight", (h, self.kept)))
        self._embedding = load_head_embedding(tensors, "embed_tokens.weight", model)
        self._token_norm = norm(module + "input_layernorm.weight")
        self._feature_norm = norm(module + "hidden_norm.weight")
        self._layer = HeadLayer(get, c, model, pages=pages, positions=positions, inputs=2)
        self._norm = norm("norm.weight")
        columns = int(settings.get("draft_vocab_size") or c.vocab_size)
        self._reading = make_linear(tensors("lm_head.weight", (columns, h)))
        self.tokens = _tokens(tensors, columns, c.vocab_size, folder)

    def features(self, kept: Tensor) -> Tensor:
        return self._join(kept)

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionMetadata,
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


def _tokens(tensors: CheckpointTensors, columns: int, vocab: int, folder: Path) -> Tensor | None:
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
