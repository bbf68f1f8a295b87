"""The files that Grafana starts with: where Prometheus is, and the dashboards.

    provisioning/datasources/baton.yaml   provisioning/dashboards/baton.yaml   *.json

The dashboards lie in this package, so that they come along wherever it is installed.

https://grafana.com/docs/grafana/latest/administration/provisioning/ fixes the shapes. Those in
deploy/grafana take what differs from place to place from variables of the environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.monitoring.files import dump

MADE = Path(__file__).parent / "made"
SOURCE_UID, SOURCE_NAME = "baton-prometheus", "Baton's Prometheus"


@dataclass(frozen=True)
class Grafana:
    """``prometheus``: its URL. ``dashboards``: their folder, as Grafana sees it. ``interval``:
    between two scrapes, so that Grafana knows how far a rate has to look back. ``head``: who made
    the files."""

    prometheus: str
    dashboards: str
    interval: str
    head: str


BY_ENVIRONMENT = Grafana(
    "${BATON_PROMETHEUS_URL}",
    "${BATON_DASHBOARDS}",
    "10s",
    "Made by `make dashboards`. Grafana starts with it where GF_PATHS_PROVISIONING names the\n"
    "folder above, BATON_PROMETHEUS_URL Prometheus, and BATON_DASHBOARDS the folder of the *.json.",
)


def files(grafana: Grafana) -> dict[str, str]:
    """Grafana's provisioning, by names below its folder."""
    source: dict[str, Any] = {
        "name": SOURCE_NAME,
        "uid": SOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": grafana.prometheus,
        "isDefault": True,
        "editable": False,
        "jsonData": {"timeInterval": grafana.interval, "httpMethod": "POST"},
    }
    provider: dict[str, Any] = {
        "name": "baton",
        "folder": "Baton",
        "type": "file",
        "allowUiUpdates": False,
        "updateIntervalSeconds": 30,
        "options": {"path": grafana.dashboards},
    }
    made = {
        "datasources": {"apiVersion": 1, "datasources": [source]},
        "dashboards": {"apiVersion": 1, "providers": [provider]},
    }
    return {
        f"provisioning/{kind}/baton.yaml": dump(value, grafana.head) for kind, value in made.items()
    }


def committed() -> dict[str, str]:
    """The dashboards' JSON by file names."""
    found = {path.name: path.read_text() for path in sorted(MADE.glob("*.json"))}
    assert found, f"no dashboards in {MADE}"
    return found
