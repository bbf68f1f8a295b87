"""Devices and models of these tests. On a CPU they check themselves; a GPU is what they are for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.decoder import DecoderModel
from engine.model.layers import build_weights
from engine.model_config.families import parse_config

POSITIONS = 512

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": {  # experts, a window in every layer
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 72,
    },
    "gemma2": {  # a window in every other layer, soft caps, norms on both sides, tied embeddings
        **LLAMA,
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 72,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 64,
    },
}


@cache
def _tensors(family: str) -> Callable[[str, tuple[int, ...]], Tensor]:
    """The checkpoint of a family, in bf16, so that both types hold the same weights."""
    generator = torch.Generator().manual_seed(5)
    drawn: dict[str, Tensor] = {}

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in drawn:
            weight = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            if len(shape) == 1:  # a norm
                weight = weight * 0.3 + (family != "gemma2")
            drawn[name] = weight.bfloat16()
        return drawn[name]

    return get


@cache
def model_of(family: str, dtype: torch.dtype, device: str) -> DecoderModel:
    """The same weights for every type and device."""
    get, config = _tensors(family), parse_config(FAMILIES[family], "test")
    weights = build_weights(lambda name, shape: get(name, shape).to(device, dtype), config)
    return DecoderModel(config, weights, POSITIONS)


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
