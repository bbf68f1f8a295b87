"""Writes the folder that Prometheus and Grafana start with.

    DIR/prometheus.yml   rules/recording.yml   rules/alerts.yml
    DIR/api-key          for the routers' /sd, where they want one
    DIR/grafana/         see ``grafana``

Nobody else may look into it. It is made whole each time: what was there under these names is
replaced, or removed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.monitoring import prometheus
from cluster.monitoring.prometheus import Watched
from cluster.monitoring.rules import Windows
from protocol.errors import StartupError

# MERGED cluster.monitoring.yaml_text
# YAML as people write it: keys in their order, texts of several lines as blocks.


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(value: Any, head: str) -> str:
    """``head``: lines of comment to begin with, without their #."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)


API_KEY = "api-key"
MADE = "Made by `baton monitoring`, which replaces it."


@dataclass(frozen=True)
class Rules:
    """``target``: as of ``alerts``. ``windows``: scaled by tests alone."""

    target: float = 0.99
    windows: Windows = field(default_factory=Windows)


def write_prometheus(
    folder: Path, watched: Watched, rules: Rules, api_key: str | None = None
) -> list[Path]:
    """What Prometheus needs; returns the files. Raises StartupError where they cannot be written.

    With ``api_key`` the file of ``watched.key_file`` is made here, too; without, none is left."""
    made = []
    if api_key is None:
        _forget(folder / API_KEY)
    else:
        watched = replace(watched, key_file=API_KEY)
        made.append(write(folder / API_KEY, api_key + "\n", 0o600))
    for name, value in (
        ("prometheus.yml", prometheus.configuration(watched)),
        (prometheus.RECORDING, prometheus.recording_rules(rules.windows)),
        (prometheus.ALERTS, prometheus.alerting_rules(rules.windows, rules.target)),
    ):
        made.append(write(folder / name, dump(value, MADE)))
    return made


def make(folder: Path) -> None:
    """For its owner alone; one that is there stays as it is. Raises StartupError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make {folder}: {error.strerror}") from None


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"cannot remove {path}: {error.strerror}") from None


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    """In the place of what is there, at once; ``mode`` from the start. Raises StartupError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    return path
