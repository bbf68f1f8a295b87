"""The supported model families: how each one's ``config.json`` becomes a ``ModelConfig``.

A family is one function from the raw config to the fields in which it differs from Llama. It needs
an entry in FAMILIES and one, even if empty, in DEFAULTS. It raises ``_Unsupported`` with the name
of a feature that no field covers, before anything is loaded; keys that it does not read have no
effect. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from engine.model_config.config import Activation, ModelConfig, MoeConfig, RopeConfig
from protocol.errors import StartupError

RawConfig: TypeAlias = dict[str, Any]
ConfigFields: TypeAlias = dict[str, Any]

_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "eos_token_id": 2}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_GEMMA_DEFAULTS = {"num_key_value_heads": 4, "eos_token_id": 1, "sliding_window": 4096}
DEFAULTS: dict[str, RawConfig] = {
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {**_MISTRAL_DEFAULTS, "sliding_window": 4096},
    "Qwen2ForCausalLM": {**_QWEN_DEFAULTS, "sliding_window": 4096},
    "Qwen3ForCausalLM": {**_QWEN_DEFAULTS, "sliding_window": 4096},
    "MixtralForCausalLM": {
        **_MISTRAL_DEFAULTS,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen3MoeForCausalLM": {
        **_QWEN_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    "Gemma2ForCausalLM": {
        **_GEMMA_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072},
}
"""Values of absent keys, as in transformers, where they differ from Llama's. A key whose value is
null is not absent."""

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class _Unsupported(Exception):
    """The config has a feature that no field of ``ModelConfig`` covers."""


def parse_config(raw: RawConfig, source: str) -> ModelConfig:
    """Return the shape in ``raw``, the content of ``config.json``. Raises StartupError, prefixed
    with ``source``, for what is not supported; LookupError, TypeError, ValueError, AttributeError
    or ArithmeticError for what is missing or malformed. Nothing is made that grows with a number in
    ``raw`` before that number has been checked."""
    architecture = (raw.get("architectures") or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise StartupError(
            f"{source}: architecture {str(architecture)[:80]} is not supported; expected one of"
            f" {known}"
        )
    raw = {**DEFAULTS[architecture], **raw}
    try:
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "unknown")
            raise _Unsupported(f"quantized weights ({str(method)[:80]}) are not supported")
        config = ModelConfig(**{**_common(raw, architecture), **family(raw)})
    except _Unsupported as error:
        raise StartupError(f"{source}: {error}") from error
    _check(config)
    return config


def _common(raw: RawConfig, architecture: str) -> ConfigFields:
    """The fields that every family reads alike."""
    eos = raw.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    heads, layers = (_size(raw, name) for name in ("num_attention_heads", "num_hidden_layers"))
    hidden, vocab = _size(raw, "hidden_size"), _size(raw, "vocab_size")
    head_dim = _size(raw, "head_dim", hidden // heads)
    return {
        "architecture": architecture,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": _size(raw, "intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": _size(raw, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_positions": _size({"max_position_embeddings": 2048, **raw}, "max_position_embeddings"),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        # Ids beyond the vocabulary, which some configs have, are never drawn.
        "eos_token_ids": tuple(t for t in map(int, ends) if 0 <= t < vocab),
        "rope": _rope(_rope_parameters(raw), raw),
        "windows": (0,) * layers,
        "attention_scale": head_dim**-0.5,
        "activation": _activation(raw.get("hidden_act", "silu")),
    }


_MOST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 31,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
}
"""Largest sizes that are taken, far above those of any model. What is made from a config grows with
them, and a hostile config must not take the memory of the process that reads it."""


def _size(raw: RawConfig, name: str, default: int | None = None) -> int:
    """Return a size. ``default`` stands for a value that is absent, null or 0. Raises KeyError,
    TypeError, ValueError or OverflowError."""
    value = raw[name] if default is None else raw.get(name) or default
    size = int(value)
    if not 1 <= size <= _MOST[name]:
        raise ValueError(f"{name} must be from 1 to {_MOST[name]}, not {str(value)[:40]}")
    return size


def _check(config: ModelConfig) -> None:
    """Raise ValueError for numbers that are not finite, and where sizes contradict each other."""
    ropes = (config.rope, config.local_rope or config.rope)
    scales = (config.norm_eps, config.attention_scale, config.embedding_scale)
    caps = (config.attention_softcap, config.logit_softcap)
    factors = [v for r in ropes for v in (r.theta, r.factor, r.low_freq_factor, r.high_freq_factor)]
    if not all(0 <= value < math.inf for value in (*scales, *caps, *factors)):  # refuses NaN
        raise ValueError("a scale, a cap or a factor is negative or not finite")
    if not all(r.theta > 0 and r.factor > 0 and r.original_positions >= 0 for r in ropes):
        raise ValueError("a base or factor of the rotary embedding is not positive")
    if not all(0 <= window <= _MOST["max_position_embeddings"] for window in config.windows):
        raise ValueError("a window must have 0 or more tokens")
    if config.heads % config.kv_heads:
        raise ValueError(f"{config.heads} heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even, not {config.head_dim}")
    if len(config.windows) != config.layers:
        raise ValueError(f"{len(config.windows)} layer types for {config.layers} layers")
    if config.moe is not None and not 0 < config.moe.per_token <= config.moe.experts:
        raise ValueError(f"{config.moe.per_token} of {config.moe.experts} experts for each token")


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        text = f"activation {str(name)[:80]!r} is not supported; expected one of {known}"
        raise _Unsupported(text)
    return ACTIVATIONS[name]


# ---- rotary embedding ------------------------------------------------------------------------


def _rope_parameters(raw: RawConfig) -> RawConfig:
    # transformers 5 writes rope_parameters; older folders have rope_theta beside rope_scaling.
    return {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}


_ROPE_FACTORS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _rope(parameters: RawConfig, raw: RawConfig) -> RopeConfig:
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_FACTORS:
        raise _Unsupported(
            f"rope type {str(kind)[:80]!r} is not supported; expected default, linear or llama3"
        )
    factors = {name: float(parameters[name]) for name in _ROPE_FACTORS[kind]}
    llama3 = kind == "llama3"
    positions = int(parameters["original_max_position_embeddings"]) if llama3 else 0
    return RopeConfig(theta=theta, kind=kind, original_positions=positions, **factors)


# ---- sliding windows -------------------------------------------------------------------------


def _uniform_windows(raw: RawConfig) -> tuple[int, ...]:
    return (int(raw.get("sliding_window") or 0),) * int(raw["num_hidden_layers"])


def _windows_by_layer(raw: RawConfig, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer: from ``layer_types``, or where it is missing, from ``slides``."""
    window = int(raw.get("sliding_window") or 0)
    layers = int(raw["num_hidden_layers"])
    types = raw.get("layer_types") or [
        "sliding_attention" if slides(i) else "full_attention" for i in range(layers)
    ]
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise _Unsupported(f"layer type {str(kind)[:80]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _qwen_windows(raw: RawConfig) -> tuple[int, ...]:
    if not raw.get("use_sliding_window"):
        return (0,) * int(raw["num_hidden_layers"])
    return _windows_by_layer(raw, lambda i: i >= int(raw.get("max_window_layers", 28)))


# ---- families --------------------------------------------------------------------------------


def _llama(raw: RawConfig) -> ConfigFields:
    bias = bool(raw.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(raw.get("mlp_bias"))}


def _mistral(raw: RawConfig) -> ConfigFields:
    return {"windows": _uniform_windows(raw)}


def _qwen2(raw: RawConfig) -> ConfigFields:
    return {"qkv_bias": True, "windows": _qwen_windows(raw)}


def _qwen3(raw: RawConfig) -> ConfigFields:
    bias = bool(raw.get("attention_bias"))
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "windows": _qwen_windows(raw),
        "head_dim": (head_dim := _size(raw, "head_dim", 128)),
        "attention_scale": head_dim**-0.5,
    }


def _mixtral(raw: RawConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=_size(raw, "num_local_experts"),
        per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=_size(raw, "intermediate_size"),
        renormalize=True,
        layers=(True,) * int(raw["num_hidden_layers"]),
        module="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return {"moe": moe, "windows": _uniform_windows(raw)}


def _qwen3_moe(raw: RawConfig) -> ConfigFields:
    step, dense = int(raw.get("decoder_sparse_step") or 1), set(raw.get("mlp_only_layers") or [])
    layers = range(int(raw["num_hidden_layers"]))
    moe = MoeConfig(
        experts=_size(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts"),
        per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=_size(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
    )
    # Unlike its dense sibling, every layer slides where sliding is on.
    windows = _uniform_windows(raw) if raw.get("use_sliding_window") else (0,) * len(layers)
    return {**_qwen3(raw), "moe": moe, "windows": windows}


def _gemma(raw: RawConfig) -> ConfigFields:
    bias = bool(raw.get("attention_bias"))
    if raw.get("use_bidirectional_attention"):
        raise _Unsupported("bidirectional attention is not supported")
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "head_dim": _size(raw, "head_dim", 256),
        "attention_scale": float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "activation": _activation(raw.get("hidden_activation") or "gelu_pytorch_tanh"),
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "tied_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "attention_softcap": float(raw.get("attn_logit_softcapping") or 0.0),
        "logit_softcap": float(raw.get("final_logit_softcapping") or 0.0),
    }


def _gemma2(raw: RawConfig) -> ConfigFields:
    return {**_gemma(raw), "windows": _windows_by_layer(raw, lambda i: i % 2 == 0)}


def _gemma3(raw: RawConfig) -> ConfigFields:
    parameters = _rope_parameters(raw)
    apart = "full_attention" in parameters  # transformers 5; before, the local theta lay beside it
    local = parameters["sliding_attention"] if apart else {}
    pattern = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    return {
        **_gemma(raw),
        "qk_norm": True,
        "windows": _windows_by_layer(raw, lambda i: (i + 1) % pattern != 0),
        "rope": _rope(
            parameters["full_attention"] if apart else parameters,
            {"rope_theta": raw.get("rope_theta") or 1_000_000.0},
        ),
        "local_rope": _rope(local, {"rope_theta": raw.get("rope_local_base_freq") or 10000.0}),
    }


FAMILIES: dict[str, Callable[[RawConfig], ConfigFields]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
