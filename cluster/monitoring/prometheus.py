"""Builds what Prometheus reads as plain data: its configuration and its files of rules.

https://prometheus.io/docs/prometheus/latest/configuration/ defines the formats.

    a router's /sd --each ``interval``--> targets, each with cluster, model, role and replica

A metric's own label takes precedence over the target's (``honor_labels``), since a router also
exports metrics of other roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.monitoring.alerts import AlertRule, alert_rules
from cluster.monitoring.rules import RecordingRule, Windows, recording_rules
from protocol.security.tls import TlsFiles

RECORDING, ALERTS = "rules/recording.yml", "rules/alerts.yml"
REPLICA_CHARS = 12
"""Characters of an instance id in the label ``replica``, as in the instance's own gauges."""


@dataclass(frozen=True)
class ScrapeConfig:
    """What Prometheus scrapes, and how. ``urls``: routers; each of them lists all targets.

    ``key_file``: file with the API key, if routers need one. ``router_ca`` and ``router_name``: CA
    (None: the system's) and host name (None: the URL's) of the routers' HTTPS certificate.
    ``alertmanagers``: host:port."""

    urls: tuple[str, ...]
    key_file: str | None = None
    router_ca: str | None = None
    router_name: str | None = None
    tls: TlsFiles | None = None
    interval: str = "10s"
    alertmanagers: tuple[str, ...] = ()


def prometheus_config(scrape: ScrapeConfig) -> dict[str, Any]:
    """Return the contents of prometheus.yml."""
    every = scrape.interval
    found: dict[str, Any] = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [RECORDING, ALERTS],
        "scrape_configs": [_scrape_job(scrape)],
    }
    if scrape.alertmanagers:
        managers = [{"static_configs": [{"targets": list(scrape.alertmanagers)}]}]
        found["alerting"] = {"alertmanagers": managers}
    return found


def _scrape_job(scrape: ScrapeConfig) -> dict[str, Any]:
    job: dict[str, Any] = {
        "job_name": "baton",
        "honor_labels": True,
        "scrape_timeout": scrape.interval,
        "http_sd_configs": [_discovery(url, scrape) for url in scrape.urls],
        "relabel_configs": _LABELS,
    }
    if (tls := scrape.tls) is not None:
        files = {"ca_file": tls.ca, "cert_file": tls.cert, "key_file": tls.key}
        job["tls_config"] = files | ({"server_name": tls.name} if tls.name else {})
    return job


def _discovery(url: str, scrape: ScrapeConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"url": f"{url}/sd", "refresh_interval": scrape.interval}
    if scrape.key_file is not None:
        # Bearer is the default, but Prometheus 2.42 does not send it here.
        found["authorization"] = {"type": "Bearer", "credentials_file": scrape.key_file}
    trust = {"ca_file": scrape.router_ca, "server_name": scrape.router_name}
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


def recording_file(windows: Windows) -> dict[str, Any]:
    """Return the contents of the file of recording rules."""
    return _group("baton-recording", [_recorded(rule) for rule in recording_rules(windows)])


def alerting_file(windows: Windows, target: float) -> dict[str, Any]:
    """Return the contents of the file of alerting rules; ``target`` as in ``alert_rules``."""
    return _group("baton-alerts", [_alert(alert) for alert in alert_rules(windows, target)])


def _group(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"groups": [{"name": name, "rules": rules}]}


def _recorded(rule: RecordingRule) -> dict[str, Any]:
    labels = {"labels": rule.labels} if rule.labels else {}
    return {"record": rule.record, "expr": rule.expr, **labels}


def _alert(alert: AlertRule) -> dict[str, Any]:
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
