"""Headers of hostile safetensors files, against the library that loads the weights.

A file that passes the check is one that the library takes, with the same tensors.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from engine.model_config.checkpoint import read_shards
from protocol.errors import StartupError
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import FuzzTarget

_FOLDER = tempfile.TemporaryDirectory(prefix="baton-fuzz-weights-")
_TYPES = ("F32", "F16", "BF16", "I8", "F4", "F6_E2M3", "C64", "BOOL", "X")


def fuzz_one(data: bytes) -> None:
    """The bytes as a file, as a header, as the index, and as choices of a header."""
    _check_file(data)
    _check_file(_file(data, b""))
    _check_index(data)
    header, size = _header(ByteReader(data))
    _check_file(_file(json.dumps(header).encode(), bytes(size)))


def _file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _check_file(content: bytes) -> None:
    folder = Path(_FOLDER.name)
    (folder / "model.safetensors").write_bytes(content)
    try:
        elements = read_shards(folder).elements
    except StartupError as error:
        assert len(str(error)) < 2000, "an error quotes the file"
        return
    if _names_twice(content):
        return  # the library has other names then, and refuses them later
    try:
        read = {name: _product(tensor["shape"]) for name, tensor in deserialize(content)}
    except SafetensorError as error:
        raise AssertionError(f"the check passes what cannot be loaded: {error}") from error
    assert read == elements


def _names_twice(content: bytes) -> bool:
    length = int.from_bytes(content[:8], "little")
    twice: list[bool] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        twice.append(len(dict(pairs)) < len(pairs))

    json.loads(content[8 : 8 + length], object_pairs_hook=note)
    return any(twice)


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _check_index(data: bytes) -> None:
    folder = Path(_FOLDER.name)
    index = folder / "model.safetensors.index.json"
    index.write_bytes(data)
    try:
        read_shards(folder)
    except StartupError as error:
        assert len(str(error)) < 2000, "an error quotes the file"
    finally:
        index.unlink()


def _header(reader: ByteReader) -> tuple[dict[str, Any], int]:
    """Return a header of a few tensors, and the bytes of data that follow."""
    header: dict[str, Any] = {}
    at = 0
    for number in range(reader.number(6)):
        shape = [reader.number(5) for _ in range(reader.number(4))]
        if reader.number(16) == 0:
            shape.append([1 << 62, 1 << 70, -1, 10**300][reader.number(4)])
        size = _product(shape) * (4, 2, 2, 1, 1, 1, 8, 1, 1)[kind := reader.number(len(_TYPES))]
        begin, end = at, at + max(0, min(size, 1 << 20)) + (reader.number(32) == 0)
        header[f"t{number}"] = {
            "dtype": _TYPES[kind],
            "shape": shape,
            "data_offsets": [begin - (reader.number(32) == 1), end],
        }
        at = end
    return header, min(at, 1 << 16)


TARGET = FuzzTarget("weights", fuzz_one)
