"""A scenario from a file and what the command line says over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.simulate.scenario import Scenario, parse, read_raw
from protocol.errors import StartupError

SAMPLE = Path(__file__).parent / "data" / "sample.yaml"


def given(path: Path | None, values: list[str], trace: Path | None) -> Scenario:
    """``values``: KEY=VALUE. A trace takes the place of the file's traffic. Raises StartupError."""
    path = path or SAMPLE
    raw = read_raw(path)
    if trace is not None:
        raw["traffic"] = {"trace": str(trace.absolute())}
        raw.pop("seconds", None)
    for text in values:
        _set(raw, text)
    return parse(raw, str(path), path.parent)


def _set(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not all([*path, last]):
        raise StartupError(f"--set: expected KEY=VALUE, as in pools.decode=4, not {text!r}")
    section = raw
    for name in path:
        inner = section.setdefault(name, {})
        if inner is None:
            inner = section[name] = {}
        if not isinstance(inner, dict):
            raise StartupError(f"--set: {key}: {name} is no section")
        section = inner
    try:
        section[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise StartupError(f"--set: {key}: {value!r} is not YAML") from None
