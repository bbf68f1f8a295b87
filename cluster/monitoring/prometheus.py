"""What Prometheus reads: its configuration, and files of rules, as plain data.

https://prometheus.io/docs/prometheus/latest/configuration/ fixes the shapes.

    a router's /sd --each ``interval``--> targets, each with cluster, model, role and replica

A metric's own label wins over the target's (``honor_labels``): a router speaks of other roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.monitoring.alerts import Alert, alerts
from cluster.monitoring.rules import Recording, Windows, recording
from protocol.security.tls import TlsFiles

RECORDING, ALERTS = "rules/recording.yml", "rules/alerts.yml"
REPLICA_CHARS = 12
"""Of an instance's id: as in the gauges of its page."""


@dataclass(frozen=True)
class Watched:
    """What is scraped, and how. ``urls``: of routers; any of them tells all targets.

    ``key_file``: with the API key, where routers want one. ``router_ca``, ``router_name``: who
    vouches for their HTTPS (None: the system's CAs), and for which name (None: the URL's).
    ``alertmanagers``: host:port."""

    urls: tuple[str, ...]
    key_file: str | None = None
    router_ca: str | None = None
    router_name: str | None = None
    tls: TlsFiles | None = None
    interval: str = "10s"
    alertmanagers: tuple[str, ...] = ()


def configuration(watched: Watched) -> dict[str, Any]:
    """prometheus.yml."""
    every = watched.interval
    found: dict[str, Any] = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [RECORDING, ALERTS],
        "scrape_configs": [_job(watched)],
    }
    if watched.alertmanagers:
        told = [{"static_configs": [{"targets": list(watched.alertmanagers)}]}]
        found["alerting"] = {"alertmanagers": told}
    return found


def _job(watched: Watched) -> dict[str, Any]:
    job: dict[str, Any] = {
        "job_name": "baton",
        "honor_labels": True,
        "scrape_timeout": watched.interval,
        "http_sd_configs": [_discovery(url, watched) for url in watched.urls],
        "relabel_configs": _LABELS,
    }
    if (tls := watched.tls) is not None:
        files = {"ca_file": tls.ca, "cert_file": tls.cert, "key_file": tls.key}
        job["tls_config"] = files | ({"server_name": tls.name} if tls.name else {})
    return job


def _discovery(url: str, watched: Watched) -> dict[str, Any]:
    found: dict[str, Any] = {"url": f"{url}/sd", "refresh_interval": watched.interval}
    if watched.key_file is not None:
        # The type is Prometheus' default, but 2.42 does not send it here.
        found["authorization"] = {"type": "Bearer", "credentials_file": watched.key_file}
    trust = {"ca_file": watched.router_ca, "server_name": watched.router_name}
    if url.startswith("https:") and any(trust.values()):
        found["tls_config"] = {name: value for name, value in trust.items() if value}
    return found


_LABELS = [
    *(
        {"source_labels": [f"__meta_baton_{name}"], "target_label": name}
        for name in ("cluster", "model", "role")
    ),
    {
        "source_labels": ["__meta_baton_instance"],
        "regex": f"(.{{{REPLICA_CHARS}}}).*",
        "target_label": "replica",
    },
]


# ---- rules --------------------------------------------------------------------------------------


def recording_rules(windows: Windows) -> dict[str, Any]:
    """A file of rules."""
    return _group("baton-recording", [_recorded(rule) for rule in recording(windows)])


def alerting_rules(windows: Windows, target: float) -> dict[str, Any]:
    """A file of rules. ``target``: as of ``alerts``."""
    return _group("baton-alerts", [_alert(alert) for alert in alerts(windows, target)])


def _group(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"groups": [{"name": name, "rules": rules}]}


def _recorded(rule: Recording) -> dict[str, Any]:
    labels = {"labels": rule.labels} if rule.labels else {}
    return {"record": rule.record, "expr": rule.expr, **labels}


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": alert.lasts} if alert.lasts else {}),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook": alert.runbook,
        },
    }
