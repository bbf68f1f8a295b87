"""What dashboards and recording rules ask Prometheus, with Grafana's variables filled in."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.test_docs import ROOT

DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
VARIABLES = {"$__rate_interval": "8s", "$__interval": "2s", "$__range": "30s", "$cluster": ".*"}


def panels() -> dict[str, str]:
    """Every query of every panel, as Grafana would send it."""
    found = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = asked(target["expr"])
    return found


def marks() -> dict[str, str]:
    """What annotates the panels: nothing, until something happens."""
    return {
        f"{path.stem}: {note['name']}": asked(note["expr"])
        for path in DASHBOARDS
        for note in json.loads(path.read_text())["annotations"]["list"]
    }


def asked(expr: str) -> str:
    for name, value in {**VARIABLES, "$model": "baton-demo"}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def rules(folder: Path) -> dict[str, str]:
    """Every recording rule's series."""
    found = {}
    for rule in yaml.safe_load((folder / "rules/recording.yml").read_text())["groups"][0]["rules"]:
        labels = ",".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
        found[f"rule: {rule['record']}{{{labels}}}"] = f"{rule['record']}{{{labels}}}"
    return found
