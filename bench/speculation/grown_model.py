"""Makes a larger model that computes the same function as a smaller one.

The speed-up of speculation depends on the acceptance rate and on the cost of the target's step. A
random model of 100 M parameters has the cost of a real one, but no draft agrees with it. So the
demo model is grown wider and deeper, with the same output.

    hidden channels      added ones are zero from the embedding on: no weight writes to them
    norms                the mean is over more channels: weights times sqrt(small / large), and eps
                         times small / large
    heads, MLP units     added ones compute from random weights, and no weight reads them
    layers               added ones compute from random weights and add zero

All weights are multiplied as usual, so that a step takes the time of a model of this shape.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.lib.engines import SHAPE_100M
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig

Source = Callable[[str], Tensor]
STD = 0.05
"""Standard deviation of the random weights."""


class ModelGrower:
    """Grows the tensors of one model shape into those of another, deterministically."""

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
        """Draw random weights [*shape]."""
        return torch.randn(shape, generator=self._generator).mul_(STD)

    def embedding(self, weight: Tensor) -> Tensor:
        """Grow an embedding [vocab, hidden] with zeros in the added channels."""
        return self.pad(weight, len(weight), self._wide)

    def norm(self, weight: Tensor) -> Tensor:
        """Grow the weight of a norm [hidden]; the added channels do not change its result."""
        out = self.noise(self._wide).add_(1.0)
        out[: len(weight)] = weight * math.sqrt(len(weight) / self._wide)
        return out

    def reads(self, weight: Tensor, rows: Tensor, count: int) -> Tensor:
        """Grow a projection [out, hidden] whose outputs become the ``rows`` of ``count``."""
        out = self.noise(count, self._wide)
        out[rows, : weight.shape[1]] = weight
        return out

    def writes(self, weight: Tensor, columns: Tensor, count: int) -> Tensor:
        """Grow a projection [hidden, in] that reads only the ``columns`` of ``count``."""
        out = torch.zeros(self._wide, count)
        out[: len(weight), columns] = weight
        return out

    @staticmethod
    def pad(weight: Tensor, rows: int, columns: int) -> Tensor:
        """Pad a matrix with zeros to [rows, columns]."""
        out = torch.zeros(rows, columns)
        out[: len(weight), : weight.shape[1]] = weight
        return out

    def layer(self, get: Source) -> Iterator[tuple[str, Tensor]]:
        """Yield the grown projections of one layer, [out, hidden] or [hidden, in]."""
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
        """Yield the two grown norms of one layer, each [hidden]."""
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self.norm(get(name))

    def idle_layer(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an added layer, whose output projections [hidden, in] are zero."""
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
    """Return the channels [heads * dim] of the given heads."""
    return (torch.tensor(heads)[:, None] * dim + torch.arange(dim)).flatten()


def write_config(source: Path, folder: Path, shape: dict[str, int]) -> None:
    """Write the config of ``source`` with another shape and the matching epsilon."""
    raw = json.loads((source / "config.json").read_text())
    eps = raw["rms_norm_eps"] * raw["hidden_size"] / shape["hidden_size"]
    raw.update(shape, rms_norm_eps=eps, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))


def grow(source: Path, folder: Path, shape: dict[str, int] = SHAPE_100M) -> Path:
    """Write the Llama in ``source`` (tied embeddings) to ``folder``, grown to ``shape``, in fp32.

    An added layer follows each of the first ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    write_config(source, folder, shape)
    small, large = load_config(source), load_config(folder)
    assert small.tied_embeddings and large.layers >= small.layers
    tensors = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    grower = ModelGrower(small, large)
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


def _layer(grower: ModelGrower, tensors: dict[str, Tensor], i: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of layer ``i`` grown, [out, in] or [hidden]; -1 is an added layer."""
    if i < 0:
        yield from grower.idle_layer()
        return

    def get(name: str) -> Tensor:
        """Return the small model's tensor, [out, in] or [hidden]."""
        return tensors[f"model.layers.{i}.{name}"]

    yield from grower.layer(get)
    yield from grower.norms(get)


Tensors = Mapping[str, Tensor]


def grow_heads(heads: Path, folder: Path, shape: dict[str, int]) -> Path:
    """Write Medusa or EAGLE heads to ``folder`` for a target grown to ``shape``, in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in heads.glob("*.json"):
        shutil.copy(path, folder / path.name)
    tensors = {name: t.float() for name, t in load_file(heads / "model.safetensors").items()}
    wide = shape["hidden_size"]
    if "fc.weight" in tensors:
        write_config(heads, folder, {**shape, "num_hidden_layers": 1})
        grower = ModelGrower(load_config(heads), load_config(folder))
        out = dict(_eagle(grower, tensors, wide))
    else:
        out = dict(_medusa(tensors, wide))
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _medusa(tensors: Tensors, wide: int) -> Iterator[tuple[str, Tensor]]:
    """Grow the blocks [hidden, hidden], their biases [hidden] and the outputs [vocab, hidden]."""
    vocab = max(len(t) for t in tensors.values())
    for name, t in tensors.items():
        grown = torch.zeros(len(t) if len(t) == vocab else wide, *[wide] * (t.dim() - 1))
        grown[tuple(slice(size) for size in t.shape)] = t
        yield name, grown


def _eagle(grower: ModelGrower, tensors: Tensors, wide: int) -> Iterator[tuple[str, Tensor]]:
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
