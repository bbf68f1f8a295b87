"""What Grafana starts with: its settings, where Prometheus is, the dashboards.

    DIR/grafana/grafana.ini   provisioning/...   dashboards/*.json

It listens on loopback; whoever reaches it may look, and nobody can change anything: there is no
account, so that there is no password either.
"""

from __future__ import annotations

from pathlib import Path

from cluster.dashboards import provision
from cluster.monitoring.files import MADE, write

HOST, PORT = "127.0.0.1", 3000

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


def write_grafana(folder: Path, prometheus: str, interval: str) -> list[Path]:
    """``folder``: DIR, absolute. ``prometheus``: its URL. ``interval``: between two scrapes.

    Raises StartupError."""
    own = folder / "grafana"
    wanted = provision.Grafana(prometheus, str(own / "dashboards"), interval, MADE)
    files = {f"dashboards/{name}": text for name, text in provision.committed().items()}
    settings = _SETTINGS.format(made=MADE, host=HOST, port=PORT, folder=own)
    files |= {**provision.files(wanted), "grafana.ini": settings}
    return [write(own / name, text) for name, text in files.items()]
