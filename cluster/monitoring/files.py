"""Writes the folder that Prometheus starts with, for `baton monitoring` and `make dashboards`.

    DIR/prometheus.yml   rules/recording.yml   rules/alerts.yml
    DIR/api-key          for the routers' /sd, if they need one
    DIR/grafana/         written by ``cluster.dashboards.provision``

`baton monitoring` creates the folder with mode 0700. Each run replaces or removes existing files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.monitoring import prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from cluster.monitoring.rules import Windows
from protocol.errors import StartupError

API_KEY = "api-key"
GENERATED_NOTICE = "Made by `baton monitoring`, which replaces it."


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules. ``target``: see ``alert_rules``. ``windows``: only tests scale them."""

    target: float = 0.99
    windows: Windows = field(default_factory=Windows)


def write_prometheus(
    folder: Path, scrape: ScrapeConfig, rules: RuleOptions, api_key: str | None = None
) -> list[Path]:
    """Write the configuration and the rules, and return the files. Raises StartupError.

    With ``api_key``, the file ``key_file`` is written too; without, an existing one is removed."""
    made = []
    if api_key is None:
        _remove(folder / API_KEY)
    else:
        scrape = replace(scrape, key_file=API_KEY)
        made.append(write_file(folder / API_KEY, api_key + "\n", 0o600))
    for name, value in (
        ("prometheus.yml", prometheus.prometheus_config(scrape)),
        (prometheus.RECORDING, prometheus.recording_file(rules.windows)),
        (prometheus.ALERTS, prometheus.alerting_file(rules.windows, rules.target)),
    ):
        made.append(write_file(folder / name, dump_yaml(value, GENERATED_NOTICE)))
    return made


def make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700; an existing one is not changed. Raises StartupError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make {folder}: {error.strerror}") from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"cannot remove {path}: {error.strerror}") from None


def write_file(path: Path, text: str, mode: int = 0o644) -> Path:
    """Write a file atomically, with ``mode`` from the start. Raises StartupError."""
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


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_yaml(value: Any, head: str) -> str:
    """Return YAML with keys in their order and multi-line texts as blocks, below a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)
