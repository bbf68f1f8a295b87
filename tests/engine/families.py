"""A small random model of every supported family, saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# name -> (transformers' class prefix, changes to SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-bias": (
        "Llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 64}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 40,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 40,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 24,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}


def save(folder: Path, family: str = "llama", shard: str = "10GB", **changes: Any) -> Path:
    """A random model of ``family`` in ``folder``, biases and norms random as well."""
    import transformers

    prefix, switches = FAMILIES[family]
    configs = {"Gemma3": "Gemma3TextConfig"}
    config_class = getattr(transformers, configs.get(prefix, f"{prefix}Config"))
    torch.manual_seed(7)
    config = config_class(**{**SIZES, **switches, **changes})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight", "layernorm.weight")):
            parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [len(tokens), vocab] in fp32; attention spelled out, with soft caps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
