"""Configs that would take the memory or the stack of the process that reads them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from engine.model_config.checkpoint import load_config, read_shards
from protocol import json_file
from protocol.errors import StartupError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers must be from 1 to 4096"),
        ({"vocab_size": float("inf")}, "not a usable model config"),
        ({"num_attention_heads": 0}, "num_attention_heads must be from 1"),
        ({"head_dim": -2}, "head_dim must be from 1"),
        ({"rms_norm_eps": float("nan")}, "negative or not finite"),
        ({"num_key_value_heads": -4}, "num_key_value_heads must be from 1"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tmp_path: Path, changes: dict[str, float], says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    tracemalloc.start()
    with pytest.raises(StartupError, match=says):
        load_config(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_nesting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(StartupError, match="nested too deeply"):
        load_config(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((5000).to_bytes(8, "little") + b'{"a":' + b"[" * 4995)
    with pytest.raises(StartupError, match="not a safetensors file"):
        read_shards(tmp_path)


def test_large_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(json_file.MAX_CONFIG_BYTES + 1)
    with pytest.raises(StartupError, match="expected at most"):
        load_config(tmp_path)


def test_end_tokens_are_integers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": ["2", 3, 400]}))
    assert load_config(tmp_path).eos_token_ids == (2, 3)
