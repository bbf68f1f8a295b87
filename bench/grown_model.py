"""A larger model that computes exactly what a smaller one does: for benchmarks of speculation.

What a draft is worth depends on how often its model agrees with the target, and on what a step of
the target costs. A random model of 100 M parameters costs what a real one does, but nothing agrees
with it. So the demo model is grown: wider, deeper, and with the same output.

    hidden channels      added ones are zero from the embedding on, for nothing writes to them
    norms                the mean is over more channels: weights times sqrt(small / large), and eps
                         times small / large
    heads, MLP units     added ones compute from random weights; nobody reads them
    layers               added ones compute from random weights; what they add is zero

All of it is multiplied out like any other weight, so a step takes what a model of this shape takes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.random_model import SHAPE_100M
from engine.checkpoint import load_config
from engine.config import ModelConfig

Source = Callable[[str], Tensor]
STD = 0.05
"""Of the random weights."""


class Grower:
    """Grows the tensors of one shape into another. Deterministic."""

    def __init__(self, small: ModelConfig, large: ModelConfig) -> None:
        assert large.head_dim == small.head_dim and large.kv_heads >= small.kv_heads
        self._small, self._large = small, large
        self._wide = large.hidden_size
        self._generator = torch.Generator().manual_seed(0)
        shared, more = small.heads // small.kv_heads, large.heads // large.kv_heads
        assert more >= shared
        # Query heads of one KV head stay together, and are the first of a larger group.
        heads = [kv * more + i for kv in range(small.kv_heads) for i in range(shared)]
        self._q = _units(heads, small.head_dim)
        self._kv = _units(list(range(small.kv_heads)), small.head_dim)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).mul_(STD)

    def embedding(self, weight: Tensor) -> Tensor:
        """[vocab, hidden]: zeros in the added channels."""
        return self.pad(weight, len(weight), self._wide)

    def norm(self, weight: Tensor) -> Tensor:
        out = self.noise(self._wide).add_(1.0)
        out[: len(weight)] = weight * math.sqrt(len(weight) / self._wide)
        return out

    def reads(self, weight: Tensor, rows: Tensor, count: int) -> Tensor:
        """A projection [out, hidden] whose outputs become the ``rows`` of ``count``."""
        out = self.noise(count, self._wide)
        out[rows, : weight.shape[1]] = weight
        return out

    def writes(self, weight: Tensor, columns: Tensor, count: int) -> Tensor:
        """A projection [hidden, in] that reads the ``columns`` of ``count``, and no others."""
        out = torch.zeros(self._wide, count)
        out[: len(weight), columns] = weight
        return out

    @staticmethod
    def pad(weight: Tensor, rows: int, columns: int) -> Tensor:
        out = torch.zeros(rows, columns)
        out[: len(weight), : weight.shape[1]] = weight
        return out

    def layer(self, get: Source) -> Iterator[tuple[str, Tensor]]:
        """One layer; ``get`` finds its tensors by their names within it."""
        c, large = self._small, self._large
        q, kv = large.heads * large.head_dim, large.kv_heads * large.head_dim
        units = torch.arange(c.intermediate_size)
        for name, rows, count in (
            ("self_attn.q_proj", self._q, q),
            ("self_attn.k_proj", self._kv, kv),
            ("self_attn.v_proj", self._kv, kv),
            ("mlp.gate_proj", units, large.intermediate_size),
            ("mlp.up_proj", units, large.intermediate_size),
        ):
            yield f"{name}.weight", self.reads(get(f"{name}.weight"), rows, count)
        yield "self_attn.o_proj.weight", self.writes(get("self_attn.o_proj.weight"), self._q, q)
        down = self.writes(get("mlp.down_proj.weight"), units, large.intermediate_size)
        yield "mlp.down_proj.weight", down

    def norms(self, get: Source) -> Iterator[tuple[str, Tensor]]:
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self.norm(get(name))

    def idle_layer(self) -> Iterator[tuple[str, Tensor]]:
        """A layer that computes and adds nothing."""
        c = self._small
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes = {
            "self_attn.q_proj": (q, c.hidden_size),
            "self_attn.k_proj": (kv, c.hidden_size),
            "self_attn.v_proj": (kv, c.hidden_size),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        }
        zeros = {
            "self_attn.o_proj": (c.hidden_size, q),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size),
        }
        weights = {f"{name}.weight": self.noise(*shape) for name, shape in shapes.items()}
        weights |= {f"{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}
        weights |= {"input_layernorm.weight": torch.ones(c.hidden_size)}
        weights |= {"post_attention_layernorm.weight": torch.ones(c.hidden_size)}
        yield from self.layer(weights.__getitem__)
        yield from self.norms(weights.__getitem__)


def _units(heads: list[int], dim: int) -> Tensor:
    """Channels of these heads."""
    return (torch.tensor(heads)[:, None] * dim + torch.arange(dim)).flatten()


def write_config(source: Path, folder: Path, shape: dict[str, int]) -> None:
    """The config of ``source`` with another shape, and the eps that goes with it."""
    raw = json.loads((source / "config.json").read_text())
    eps = raw["rms_norm_eps"] * raw["hidden_size"] / shape["hidden_size"]
    raw.update(shape, rms_norm_eps=eps, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))


def grow(source: Path, folder: Path, shape: dict[str, int] = SHAPE_100M) -> Path:
    """Write to ``folder`` the Llama in ``source`` (tied embeddings) grown to ``shape``, in fp32.
    An added layer follows each of the first ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    write_config(source, folder, shape)
    small, large = load_config(source), load_config(folder)
    assert small.tied_embeddings and large.layers >= small.layers
    tensors = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    grower = Grower(small, large)
    out = {
        "model.embed_tokens.weight": grower.embedding(tensors["model.embed_tokens.weight"]),
        "model.norm.weight": grower.norm(tensors["model.norm.weight"]),
    }
    idle = large.layers - small.layers
    order = [i for i in range(small.layers) for i in ([i, -1] if i < idle else [i])]
    order += [-1] * (large.layers - len(order))
    for at, i in enumerate(order):
        prefix = f"model.layers.{at}."
        out |= {prefix + name: t for name, t in _layer(grower, tensors, i)}
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(grower: Grower, tensors: dict[str, Tensor], i: int) -> Iterator[tuple[str, Tensor]]:
    """Layer ``i`` grown; -1: an idle one."""
    if i < 0:
        yield from grower.idle_layer()
        return

    def get(name: str) -> Tensor:
        return tensors[f"model.layers.{i}.{name}"]

    yield from grower.layer(get)
    yield from grower.norms(get)
