"""The operator's YAML files: the cluster's configuration and the file of API keys."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cluster.config.mistakes import ConfigError
from cluster.config.yaml_file import parse_config_file, read_config_file
from protocol.errors import StartupError
from router.tenants.key_file import read_key_table
from tests.fuzz.target import Budget, FuzzTarget

_FOLDER = tempfile.TemporaryDirectory(prefix="baton-fuzz-yaml-")

_MOST_BRACKETS = 400
"""PyYAML's own scanner takes time that grows with the square of the depth, a second until it meets
Python's recursion limit. The configuration is the operator's, so that is left as it is; the file of
keys is read by libyaml."""


def fuzz_one(data: bytes) -> None:
    path = Path(_FOLDER.name) / "file.yaml"
    path.write_bytes(data)
    path.chmod(0o600)
    if data.count(b"[") + data.count(b"{") <= _MOST_BRACKETS:
        contents = read_config_file(path, "file")
        assert all(str(mistake) for mistake in contents.mistakes)
        parse_config_file(data.decode("utf-8", "replace"), "file")
    try:
        read_key_table(str(path))
    except (StartupError, ConfigError) as error:
        assert len(str(error)) < 4000


TARGET = FuzzTarget(
    "yaml_files",
    fuzz_one,
    Budget(base_s=0.4, s_per_byte=4e-4, base_bytes=4 << 20, bytes_per_byte=4000),
    examples=40,
)
