"""Headers of weights, whole and damaged."""

import json
import struct
from pathlib import Path

import pytest

from engine.model_config.checkpoint import read_shards
from protocol.errors import StartupError

NAME = "model.safetensors"


def write(path: Path, tensors: dict[str, list[int]], cut: int = 0) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    text = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + bytes(at))[: -cut or None])


def test_elements_of_all_shards_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": [3, 4], "y": [5]})
    write(tmp_path / "b.safetensors", {"z": []})
    shards = read_shards(tmp_path)
    assert shards.files == 2 and shards.elements == {"x": 12, "y": 5, "z": 1}
    assert shards.file_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04 something else entirely", "not a safetensors file"),
        (struct.pack("<Q", 10) + b"not json !", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 16) + b'{"x":{"shape":3}', "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StartupError, match=says):
        read_shards(tmp_path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / NAME, {"x": [100]}, cut=7)
    with pytest.raises(StartupError, match="but its header says"):
        read_shards(tmp_path)


def test_missing_files_are_counted_and_named(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"x": [1]})
    index = {"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(1, 4)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match="2 of 3 files of weights are missing: model-2"):
        read_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(StartupError, match="cannot read the index"):
        read_shards(tmp_path)
