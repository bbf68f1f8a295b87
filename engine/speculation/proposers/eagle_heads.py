"""EAGLE heads of one layer: their checkpoint formats and their forward pass.

EAGLE-1 and EAGLE-2 heads are alike:

    fc.weight [hidden, 2 * hidden], fc.bias (optional)
    layers.0.self_attn.{q,k,v,o}_proj.*, layers.0.mlp.{gate,up,down}_proj.*
    layers.0.post_attention_layernorm.weight
    embed_tokens.weight (optional; else the target's)       lm_head.weight (the target's is used)

Their layer takes fc([embedding of token t + 1 | feature t]) without a norm before its attention and
returns feature t + 1, which the target's LM head reads (Li et al. 2024, EAGLE, section 4.1;
EAGLE-2, section 4). A feature is the target's hidden state after the final norm.

EAGLE-3 heads:

    fc.weight [hidden, 3 * hidden]                the inputs of three of the target's layers
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight
    midlayer.self_attn.{q,k,v}_proj.weight [.., 2 * hidden], midlayer.self_attn.o_proj.weight
    midlayer.mlp.{gate,up,down}_proj.weight
    norm.weight, lm_head.weight [draft vocabulary, hidden]
    d2t [draft vocabulary]    offset from each logit column to its token id
    t2d, embed_tokens.weight (optional; else the target's)

Their feature is fc of the three layer inputs. Attention reads the normed embedding of token t + 1
beside the normed feature t. The layer's output is the next feature; the head's own LM head reads it
normed (Li et al. 2025, EAGLE-3, section 3.1). The layers are 2, the middle one and the third to
last, or ``eagle_aux_hidden_state_layer_ids`` in config.json.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.attention_metadata import AttentionMetadata
from engine.model.decoder import DecoderModel
from engine.model.linear import Linear, RmsNorm, make_draft_linear, make_linear
from engine.model.weights import CheckpointTensors
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from engine.speculation.draft_source import read_head_config
from engine.speculation.proposers.eagle_layer import HeadLayer
from protocol.errors import StartupError

EAGLE_TENSORS = re.compile(
    r"(model\.)?(fc\.(weight|bias)|embed_tokens\.weight|layers\.0\.(self_attn|mlp)\..*"
    r"|layers\.0\.post_attention_layernorm\.weight)|lm_head\.weight"
)
EAGLE3_TENSORS = re.compile(
    r"fc\.weight|(midlayer|layers\.0)\.(self_attn|mlp)\..*|(norm|lm_head|embed_tokens)\.weight"
    r"|(midlayer|layers\.0)\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight|d2t|t2d"
)


class EagleHead:
    """An EAGLE-1 or EAGLE-2 head, loaded from ``folder``. It computes a token's feature from the
    target's states stored for the token; its forward pass maps a token and the feature before it to
    the next feature, from which it computes logits."""

    taps: tuple[int, ...] = ()  # target layers whose inputs are stored; empty: its output is
    state_size: int  # elements stored for each token
    tokens: Tensor | None = None  # [columns] token ids of the logit columns; None: their indices

    def __init__(self, model: DecoderModel, folder: Path, pages: int, positions: int) -> None:
        """``positions`` is the maximum length of a text. Raises StartupError if a tensor is missing
        or does not fit the target."""
        self.config = c = load_head_config(folder, model.config)
        self._model, self.state_size = model, c.hidden_size
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        check_tensor_names(
            tensors.names, EAGLE_TENSORS, folder, "an EAGLE-1 or EAGLE-2 head of one layer"
        )
        prefix = "model." if "model.fc.weight" in tensors.names else ""

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            """Load a tensor of the layer with ``shape`` [out, in] or [out]."""
            return tensors(f"{prefix}layers.0.{name}", shape)

        self._fc = _load_fc(tensors, prefix, c.hidden_size)
        self._embedding = load_head_embedding(tensors, prefix + "embed_tokens.weight", model)
        self._layer = HeadLayer(get, c, model, pages=pages, positions=positions)

    def features(self, states: Tensor) -> Tensor:
        """Return features [T, hidden] of the target's output [T, hidden]."""
        return self._model.weights.final_norm(states)

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionMetadata,
    ) -> Tensor:
        """Return the features [T, hidden] after ``tokens`` [T], given those [T, hidden] before.
        positions, slots: [T] of the tokens, whose KV is written to the pool. All rows are decode
        rows of ``view``."""
        x = self._fc(torch.cat((F.embedding(tokens, self._embedding), features), -1))
        return self._layer(x, x, positions, slots, view)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [T, vocab] in fp32 of features [T, hidden]."""
        return self._model.lm_head(features)


class Eagle3Head:
    """An EAGLE-3 head, loaded from ``folder``."""

    def __init__(self, model: DecoderModel, folder: Path, pages: int, positions: int) -> None:
        """``positions`` is the maximum length of a text. Raises StartupError if a tensor is missing
        or does not fit the target."""
        settings = read_head_config(folder)
        self.config = c = load_head_config(folder, model.config)
        self.taps = _taps(settings, model.config.layers, folder)
        h, self.state_size = c.hidden_size, len(self.taps) * c.hidden_size
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        check_tensor_names(tensors.names, EAGLE3_TENSORS, folder, "an EAGLE-3 head of one layer")
        published = any(name.startswith("midlayer.") for name in tensors.names)
        module = "midlayer." if published else "layers.0."

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            """Load a tensor of the layer with ``shape`` [out, in] or [out]."""
            return tensors(module + name, shape)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors(name, (h,)), c.norm_eps)

        self._fc = make_draft_linear(tensors("fc.weight", (h, self.state_size)))
        self._embedding = load_head_embedding(tensors, "embed_tokens.weight", model)
        self._token_norm = norm(module + "input_layernorm.weight")
        self._feature_norm = norm(module + "hidden_norm.weight")
        self._layer = HeadLayer(get, c, model, pages=pages, positions=positions, inputs=2)
        self._norm = norm("norm.weight")
        columns = int(settings.get("draft_vocab_size") or c.vocab_size)
        self._lm_head = make_linear(tensors("lm_head.weight", (columns, h)))
        self.tokens = _token_ids(tensors, columns, c.vocab_size, folder)

    def features(self, states: Tensor) -> Tensor:
        """Return features [T, hidden] of layer inputs [T, 3 * hidden]."""
        return self._fc(states)

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionMetadata,
    ) -> Tensor:
        """Return the next features [T, hidden]; see EagleHead."""
        embedded = self._token_norm(F.embedding(tokens, self._embedding))
        x = torch.cat((embedded, self._feature_norm(features)), -1)
        return self._layer(x, features, positions, slots, view)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [T, columns] in fp32 of features [T, hidden]."""
        return self._lm_head(self._norm(features)).float()


AnyEagleHead: TypeAlias = EagleHead | Eagle3Head


def load_head_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """Return the config of the head's layer. Raises StartupError if there is none or it does not
    fit the target."""
    path = folder / "config.json"
    try:
        c = parse_config(
            {**read_head_config(folder), "architectures": ["LlamaForCausalLM"]}, str(path)
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        text = f"{path}: not a usable config of a head: {repr(error)[:300]}"
        raise StartupError(text) from error
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
    """Check that every tensor name is ``known``. Raises StartupError naming an unknown one."""
    unknown = sorted(name for name in names if not known.fullmatch(name))
    if unknown:
        raise StartupError(f"{folder}: tensor {unknown[0]} is none of {expected}")


def load_head_embedding(tensors: CheckpointTensors, name: str, model: DecoderModel) -> Tensor:
    """Return the head's embedding [vocab, hidden], or the target's tensor if both are equal."""
    shared = model.weights.embedding
    if name not in tensors.names:
        return shared
    own = tensors(name, tuple(shared.shape))
    return shared if torch.equal(own, shared) else own


def _load_fc(tensors: CheckpointTensors, prefix: str, hidden: int) -> Linear:
    bias = prefix + "fc.bias"
    return make_draft_linear(
        tensors(prefix + "fc.weight", (hidden, 2 * hidden)),
        tensors(bias, (hidden,)) if bias in tensors.names else None,
    )


def _taps(settings: dict[str, Any], layers: int, folder: Path) -> tuple[int, ...]:
    """Return the tapped layers. Raises StartupError for layers that the target lacks."""
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


def _token_ids(tensors: CheckpointTensors, columns: int, vocab: int, folder: Path) -> Tensor | None:
    """Return the token id of each logit column, [columns] int64; None: the column's index."""
    if "d2t" not in tensors.names:
        if columns != vocab:
            raise StartupError(f"{folder}: tensor d2t is missing; lm_head reads {columns} tokens")
        return None
    above = tensors.stored("d2t", (columns,)).long()
    tokens = torch.arange(columns, device=above.device) + above
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise StartupError(f"{folder}: d2t leads beyond the vocabulary of {vocab} tokens")
    return tokens
