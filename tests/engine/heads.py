"""Small random checkpoints of Medusa and EAGLE heads, and their predictions in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from engine.model.decoder import DecoderModel
from tests.engine.families import SIZES

State = dict[str, Tensor]


@dataclass
class Reference:
    """The target as loaded by transformers: features, embedding and LM head."""

    folder: Path

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """Return the inputs of the LM head: [tokens, hidden]."""
        out: Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return out

    @torch.no_grad()
    def inputs(self, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
        """Return the inputs of n decoder layers, concatenated: [tokens, n * hidden]."""
        found = self.model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([found[i][0] for i in layers], -1)

    def embed(self, tokens: list[int]) -> Tensor:
        """Return the embeddings: [tokens, hidden]."""
        out: Tensor = self.model.model.embed_tokens.weight.detach()[tokens]
        return out

    def read(self, features: Tensor) -> Tensor:
        """Return the logits [..., vocab] of features [..., hidden]."""
        return features @ self.model.lm_head.weight.detach().t()


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.3)
        for name, shape in shapes.items()
    }


def write(folder: Path, state: State, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- Medusa ----------------------------------------------------------------------------------


def medusa_state(model: DecoderModel, heads: int = 3, blocks: int = 1) -> State:
    """Return random weights in the published layout."""
    h, vocab = model.config.hidden_size, model.config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (h, h)
            shapes[f"{head}.{block}.linear.bias"] = (h,)
        shapes[f"{head}.{blocks}.weight"] = (vocab, h)
    return random_state(shapes)


def medusa_logits(state: State, features: Tensor, heads: int = 3, blocks: int = 1) -> Tensor:
    """Return the logits [heads, vocab] of features [hidden]."""
    out = []
    for head in range(heads):
        x = features
        for block in range(blocks):
            name = f"{head}.{block}.linear."
            x = x + F.silu(state[name + "weight"] @ x + state[name + "bias"])
        out.append(state[f"{head}.{blocks}.weight"] @ x)
    return torch.stack(out)


# ---- EAGLE -----------------------------------------------------------------------------------

EAGLE_CONFIG: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bias": True,
}


def eagle_state(model: DecoderModel, bias: bool = True) -> State:
    c = EAGLE_CONFIG
    h, n = model.config.hidden_size, c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 2 * h),
        "layers.0.self_attn.q_proj.weight": (q, h),
        "layers.0.self_attn.k_proj.weight": (kv, h),
        "layers.0.self_attn.v_proj.weight": (kv, h),
        "layers.0.self_attn.o_proj.weight": (h, q),
        "layers.0.mlp.gate_proj.weight": (n, h),
        "layers.0.mlp.up_proj.weight": (n, h),
        "layers.0.mlp.down_proj.weight": (h, n),
        "layers.0.post_attention_layernorm.weight": (h,),
    }
    return random_state(shapes | ({"fc.bias": (h,)} if bias else {}))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Apply RMS norm to x [..., hidden]; weight: [hidden]."""
    return (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EAGLE_CONFIG["rms_norm_eps"]) * weight
    )


def eagle_features(state: State, embedded: Tensor, before: Tensor, start: int) -> Tensor:
    """Return the next features [n, hidden] of n tokens, the first at position ``start``.

    The inputs, both [n, hidden], are their embeddings and the features before them. Positions
    before ``start`` are not attended to."""
    x = torch.cat([embedded, before], -1) @ state["fc.weight"].t() + state.get("fc.bias", 0.0)
    return layer(state, "layers.0.", x, x, start)


def layer(state: State, module: str, x: Tensor, residual: Tensor, start: int) -> Tensor:
    """Run a Llama layer on x [n, width]; add its output to ``residual`` [n, hidden]."""
    c = EAGLE_CONFIG
    dim = c["head_dim"]
    state = {name.removeprefix(module): t for name, t in state.items() if name.startswith(module)}
    angles = (start + torch.arange(len(x)))[:, None] * (
        c["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
    )

    def split(part: str, turn: bool) -> Tensor:
        y = (x @ state[f"self_attn.{part}_proj.weight"].t()).unflatten(-1, (-1, dim))
        if turn:
            a, b = y.chunk(2, -1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return y.transpose(0, 1)

    q, k, v = split("q", True), split("k", True), split("v", False)
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(-1, -2)) * dim**-0.5
    scores += torch.full(scores.shape[-2:], float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = residual + attended @ state["self_attn.o_proj.weight"].t()
    normed = norm(x, state["post_attention_layernorm.weight"])
    gate = F.silu(normed @ state["mlp.gate_proj.weight"].t())
    up = normed @ state["mlp.up_proj.weight"].t()
    return x + (gate * up) @ state["mlp.down_proj.weight"].t()


def eagle_ranks(
    state: State, reference: Reference, text: list[int], start: int, depths: int
) -> list[Tensor]:
    """Return the logits [vocab] of each depth after ``text``, following the most likely tokens.

    The head knows the tokens from position ``start`` on."""
    features = list(reference.features(text)[start - 1 : len(text) - 1])
    known = text[start:]
    out: list[Tensor] = []
    for depth in range(depths):
        if depth:
            known.append(int(out[-1].argmax()))
        made = eagle_features(state, reference.embed(known), torch.stack(features), start)[-1]
        features.append(made)
        out.append(reference.read(made))
    return out


# ---- EAGLE-3 ---------------------------------------------------------------------------------

TAPS = (0, 1, 2)
DRAFT_VOCAB = 200
EAGLE3_CONFIG: dict[str, Any] = {
    **EAGLE_CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
}


def eagle3_state(model: DecoderModel) -> State:
    c, h = EAGLE3_CONFIG, model.config.hidden_size
    old = {n: t.shape for n, t in eagle_state(model, bias=False).items() if n.startswith("layers")}
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer." + name.removeprefix("layers.0."): (shape[0], 2 * h)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        else tuple(shape)
        for name, shape in old.items()
    }
    shapes |= {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (DRAFT_VOCAB, h)}
    shapes |= {f"midlayer.{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm")}
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randperm(c["vocab_size"], generator=generator)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(c["vocab_size"], dtype=torch.bool)
    t2d[tokens] = True
    return {**random_state(shapes), "d2t": tokens - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def eagle3_ranks(
    state: State, reference: Reference, text: list[int], start: int, depths: int
) -> list[Tensor]:
    """Return the same for EAGLE-3: [vocab], -inf for tokens outside the head's vocabulary."""
    seen = reference.inputs(text, TAPS)[start - 1 : len(text) - 1]
    features = list(seen @ state["fc.weight"].t())
    known = text[start:]
    out: list[Tensor] = []
    for depth in range(depths):
        if depth:
            known.append(int(out[-1].argmax()))
        before = torch.stack(features)
        embedded = norm(reference.embed(known), state["midlayer.input_layernorm.weight"])
        x = torch.cat([embedded, norm(before, state["midlayer.hidden_norm.weight"])], -1)
        made = layer(state, "midlayer.", x, before, start)[-1]
        features.append(made)
        logits = torch.full((EAGLE_CONFIG["vocab_size"],), float("-inf"))
        tokens = torch.arange(DRAFT_VOCAB) + state["d2t"]
        logits[tokens] = norm(made, state["norm.weight"]) @ state["lm_head.weight"].t()
        out.append(logits)
    return out
