"""Shape of a model, read from a Hugging Face folder's ``config.json``. Torch-free."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import StartupError

SUPPORTED = ("LlamaForCausalLM",)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's frequency scaling (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder. Sizes are in elements, ``max_positions`` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Number of weights."""
        h = self.hidden_size
        attention = h * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + h

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of KV cache that one token takes: 2 * layers * kv_heads * head_dim * bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def _refuse(path: Path, what: str) -> StartupError:
    return StartupError(f"{path}: {what}")


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters; older folders have rope_theta beside rope_scaling.
    params = raw.get("rope_parameters") or {}
    scaling = params or raw.get("rope_scaling") or {}
    theta = float(params.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _refuse(path, f"rope type {kind!r} is not supported; expected default or llama3")
    return theta, RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_positions=int(scaling["original_max_position_embeddings"]),
    )


def parse_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """The shape in ``raw``; raises StartupError naming what is not supported or missing."""
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise _refuse(
            path, f"architecture {architecture} is not supported; expected {', '.join(SUPPORTED)}"
        )
    for switch in ("attention_bias", "mlp_bias"):
        if raw.get(switch):
            raise _refuse(path, f"{switch} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise _refuse(path, f"hidden_act {raw['hidden_act']!r} is not supported; expected silu")
    if raw.get("quantization_config"):
        raise _refuse(path, "quantized weights are not supported")
    theta, scaling = _rope(raw, path)
    eos = raw.get("eos_token_id")
    heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json`` (and the end tokens of ``generation_config.json``)."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            raw["eos_token_id"] = eos if eos is not None else raw.get("eos_token_id")
        return parse_config(raw, path)
    except OSError as error:
        raise _refuse(path, f"cannot read the model's config: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _refuse(path, f"not a usable model config: {error!r}") from error


def fingerprint(folder: Path, dtype: str) -> str:
    """Identity of the model's numbers: KV computed under one fingerprint is never read under
    another. Covers config, tensor names, shapes and offsets, file sizes, and samples of the
    weights' bytes (a hash of many gigabytes would take longer than loading them)."""
    h = hashlib.blake2b(digest_size=16)
    h.update(dtype.encode())
    h.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        h.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(1 << 20, size // 64)):
                file.seek(start)
                h.update(file.read(1 << 16))
    return h.hexdigest()
