"""The config of Llama-3-8B, for tests of memory; they may run where only the engine is."""

from __future__ import annotations

from engine.model_config.config import ModelConfig, RopeConfig

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    max_positions=131072,
    tied_embeddings=False,
    eos_token_ids=(128001,),
    rope=RopeConfig(theta=500000.0),
    windows=(0,) * 32,
    attention_scale=128**-0.5,
)
