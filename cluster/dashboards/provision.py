"""Writes the files that Grafana starts with: settings, the data source, the dashboards.

    DIR/grafana/grafana.ini   provisioning/...   dashboards/*.json

Grafana listens on loopback; anonymous visitors can look and logins are disabled, so there are no
passwords. The dashboards are data of this package (``made``), so that they are installed with it.
https://grafana.com/docs/grafana/latest/administration/provisioning/ defines the formats. The files
in deploy/grafana read from environment variables what differs between installations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.monitoring.files import GENERATED_NOTICE, dump_yaml, write_file

MADE = Path(__file__).parent / "made"
SOURCE_UID, SOURCE_NAME = "baton-prometheus", "Baton's Prometheus"
GRAFANA_HOST, GRAFANA_PORT = "127.0.0.1", 3000

_SETTINGS = """\
; {made}
[server]
http_addr = {host}
http_port = {port}
[paths]
data = {folder}/data
logs = {folder}/data/log
provisioning = {folder}/provisioning
[auth.anonymous]
enabled = true
org_role = Viewer
[auth]
disable_login_form = true
[security]
disable_initial_admin_creation = true
[dashboards]
default_home_dashboard_path = {folder}/dashboards/service.json
[analytics]
reporting_enabled = false
check_for_updates = false
check_for_plugin_updates = false
"""


@dataclass(frozen=True)
class GrafanaProvisioning:
    """Contents of the provisioning files.

    ``prometheus``: URL of Prometheus. ``dashboards``: the folder of the dashboards as Grafana sees
    it. ``interval``: time between two scrapes, from which Grafana derives the windows of rates.
    ``head``: comment that says what wrote the files."""

    prometheus: str
    dashboards: str
    interval: str
    head: str


BY_ENVIRONMENT = GrafanaProvisioning(
    "${BATON_PROMETHEUS_URL}",
    "${BATON_DASHBOARDS}",
    "10s",
    "Made by `make dashboards`. Grafana starts with it where GF_PATHS_PROVISIONING names the\n"
    "folder above, BATON_PROMETHEUS_URL Prometheus, and BATON_DASHBOARDS the folder of the *.json.",
)


def write_grafana(folder: Path, prometheus: str, interval: str) -> list[Path]:
    """Write DIR/grafana, and return its files. ``folder`` is DIR, as an absolute path.

    ``prometheus`` is the URL of Prometheus, ``interval`` the time between two scrapes. Raises
    StartupError."""
    own = folder / "grafana"
    wanted = GrafanaProvisioning(prometheus, str(own / "dashboards"), interval, GENERATED_NOTICE)
    files = {f"dashboards/{name}": text for name, text in committed_dashboards().items()}
    settings = _SETTINGS.format(
        made=GENERATED_NOTICE, host=GRAFANA_HOST, port=GRAFANA_PORT, folder=own
    )
    files |= {**provisioning_files(wanted), "grafana.ini": settings}
    return [write_file(own / name, text) for name, text in files.items()]


def provisioning_files(grafana: GrafanaProvisioning) -> dict[str, str]:
    """Return the text of the provisioning files by their paths below Grafana's folder."""
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
        f"provisioning/{kind}/baton.yaml": dump_yaml(value, grafana.head)
        for kind, value in made.items()
    }


def committed_dashboards() -> dict[str, str]:
    """Return the JSON of the generated dashboards by file name."""
    found = {path.name: path.read_text() for path in sorted(MADE.glob("*.json"))}
    assert found, f"no dashboards in {MADE}"
    return found
