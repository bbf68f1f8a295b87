"""What a model folder in Hugging Face layout says of itself. Torch-free."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.families import parse_config
from protocol.errors import StartupError


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json`` (and the end tokens of ``generation_config.json``).

    Raises StartupError naming what is not supported or not usable."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            raw["eos_token_id"] = eos if eos is not None else raw.get("eos_token_id")
        return parse_config(raw, str(path))
    except OSError as error:
        raise StartupError(f"{path}: cannot read the model's config: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StartupError(f"{path}: not a usable model config: {error!r}") from error


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
