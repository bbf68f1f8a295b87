"""Read a model folder in Hugging Face layout: its config, its fingerprint, and the headers of its
safetensors files. No weight is read. Torch-free.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype,
shape and place of every tensor), and the tensors.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from protocol.errors import StartupError
from protocol.json_file import read_json_file


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json`` (and the end tokens of ``generation_config.json``).

    Raises StartupError with the name of what is not supported or not usable."""
    path = folder / "config.json"
    raw = _read_object(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_object(generation).get("eos_token_id")
        raw["eos_token_id"] = eos if eos is not None else raw.get("eos_token_id")
    try:
        return parse_config(raw, str(path))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        text = f"{path}: not a usable model config: {repr(error)[:300]}"
        raise StartupError(text) from error


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json_file(path, what="model config")
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise StartupError(f"{path}: not a usable model config: a {kind}, expected an object")
    return value


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


_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48  # of a tensor: above the weights of any model

_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ELEMENTS)]

_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of one element of each type of the format (safetensors 0.8)."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]  # from the end of the header

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


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
                f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` there"
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
        metadata = raw.get("__metadata__")
        if metadata is not None:
            msgspec.json.decode(metadata, type=dict[str, str] | None)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, types, UTF-8
        raise StartupError(f"{path}: not a safetensors file: {str(error)[:300]}") from error
    expected = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size != expected:
        raise StartupError(
            f"{path}: {size} bytes, but its header says {expected}; download the file again"
        )
    _check_places(path, tensors)
    return {name: tensor.elements for name, tensor in tensors.items()}


def _check_places(path: Path, tensors: dict[str, _Tensor]) -> None:
    """Raise StartupError unless the tensors follow each other without gaps and overlaps, and each
    has the bytes of its shape: the library that loads the weights requires it, too."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        bits = _DTYPE_BITS.get(tensor.dtype)
        if bits is None:
            raise StartupError(f"{path}: tensor {name[:80]!r} has a type that is not of the format")
        if begin != at or tensor.elements * bits != 8 * (end - begin):
            raise StartupError(
                f"{path}: tensor {name[:80]!r} cannot lie at bytes {begin} to {end} of the data;"
                " fetch the file again"
            )
        at = end


def _check_index(folder: Path, present: set[str]) -> None:
    """Raise StartupError when files that the index names are missing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        if index.stat().st_size > _LARGEST_HEADER:
            raise StartupError(f"{index}: larger than {_LARGEST_HEADER} bytes; fetch it again")
        wanted = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (ValueError, RecursionError, OSError) as error:  # ValueError: bad JSON, types, UTF-8
        reason = str(error)[:300]
        raise StartupError(f"{index}: cannot read the index of the weights: {reason}") from error
    if missing := sorted(wanted - present):
        named = ", ".join(name[:80] for name in missing[:3])
        shown = named + (", ..." if len(missing) > 3 else "")
        raise StartupError(
            f"{folder}: {len(missing)} of {len(wanted)} files of weights are missing: {shown}"
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
