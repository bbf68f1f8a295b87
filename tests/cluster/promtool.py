"""Prometheus' own judge of rules (`promtool test rules`), over series written in its notation:
``0+100x60`` is 0, 100, 200, ... for 60 intervals."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.monitoring.prometheus import ALERTS, RECORDING
from tests.system import program

FIRING = 'count by (alertname, severity) (ALERTS{alertstate="firing"})'


def promtool(*arguments: str) -> str:
    """What it says; fails where it finds a fault."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def judge(
    folder: Path,
    series: Mapping[str, str],
    expected: Mapping[str, set[tuple[str, str]]],
    interval: str = "1m",
) -> None:
    """``expected``: alerts that fire, as (name, severity), by the time since the start. ``folder``
    has the rules; ``interval``: between samples, and between looks at the rules."""
    test: dict[str, Any] = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": FIRING, "eval_time": at, "exp_samples": [_sample(*each) for each in alerts]}
            for at, alerts in expected.items()
        ],
    }
    file = folder / "case.yml"
    rules = [RECORDING, ALERTS]
    file.write_text(
        yaml.safe_dump({"rule_files": rules, "evaluation_interval": interval, "tests": [test]})
    )
    promtool("test", "rules", str(file))


def _sample(name: str, severity: str) -> dict[str, Any]:
    return {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1}
