"""Read a model folder in Hugging Face layout: its config, its fingerprint, and the headers of its
safetensors files. No weight is read. Torch-free.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype,
shape and place of every tensor), and the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from protocol.errors import StartupError


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json`` (and the end tokens of ``generation_config.json``).

    Raises StartupError with the name of what is not supported or not usable."""
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
    """Return the identity of the model's numbers: KV computed under one fingerprint is never read
    under another.

    It covers config, tensor names, shapes and offsets, file sizes, and samples of the weights'
    bytes (a hash of many gigabytes would take longer than loading them)."""
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


_LARGEST_HEADER = 100 << 20  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class WeightShards(msgspec.Struct, frozen=True):
    """The tensors of a model folder, all files together."""

    files: int
    file_bytes: int
    elements: dict[str, int]  # number of elements of each tensor


def read_shards(folder: Path) -> WeightShards:
    """Read the headers of all safetensors files. Raises StartupError for files that are missing,
    cut short, or not safetensors."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise StartupError(f"{folder}: no *.safetensors file; expected the model's weights there")
    _check_index(folder, {path.name for path in paths})
    elements: dict[str, int] = {}
    try:
        for path in paths:
            elements |= _read(path)
        return WeightShards(len(paths), sum(path.stat().st_size for path in paths), elements)
    except OSError as error:
        reason = error.strerror
        raise StartupError(f"{folder}: cannot read the weights: {reason}") from error


def resident_elements(shards: WeightShards, config: ModelConfig, *, on_cpu: bool) -> int:
    """Return the number of elements that a loaded model keeps in memory. On a CPU the head is held
    beside the embedding even where they are tied, because it is reordered for oneDNN."""
    elements = sum(shards.elements.values())
    if config.tied_embeddings:
        elements -= shards.elements.get("lm_head.weight", 0)
        elements += config.vocab_size * config.hidden_size if on_cpu else 0
    return elements


def _read(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise StartupError(
                f"{path}: a Git LFS pointer, not the weights; `git lfs pull` there gets them"
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or not 0 < length <= min(size - 8, _LARGEST_HEADER):
            raise StartupError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
        file.seek(8)
        header = file.read(length)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors = {
            name: msgspec.json.decode(entry, type=_Tensor)
            for name, entry in raw.items()
            if name != "__metadata__"
        }
    except msgspec.DecodeError as error:
        raise StartupError(f"{path}: not a safetensors file: {error}") from error
    expected = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size != expected:
        raise StartupError(
            f"{path}: {size} bytes where its header says {expected}; fetch the file again"
        )
    return {name: math.prod(tensor.shape) for name, tensor in tensors.items()}


def _check_index(folder: Path, present: set[str]) -> None:
    """Raise StartupError when files that the index names are missing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        wanted = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.DecodeError, OSError) as error:
        raise StartupError(f"{index}: cannot read the index of the weights: {error}") from error
    if missing := sorted(wanted - present):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise StartupError(
            f"{folder}: {len(missing)} of {len(wanted)} files of weights are missing: {shown}"
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
