"""`baton autoscale` as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.local.redis_server import EmbeddedRedis


def test_autoscale_runs_until_sigterm(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    redis.start()
    environment = os.environ | {
        "BATON_HOME": str(tmp_path / "home"),
        "BATON_REDIS_URL": redis.url,
        "BATON_TOKEN": "s3cret",
    }
    scaler = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli.main", "autoscale"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert scaler.stdout is not None
        said = [scaler.stdout.readline() for _ in range(3)]
        scaler.send_signal(signal.SIGTERM)
        rest, _ = scaler.communicate(timeout=20)
    finally:
        scaler.kill()
        redis.stop()
    assert scaler.returncode == 0, rest
    assert said[0].startswith("autoscaler.mode is off, so decisions are only reported"), said
    path = tmp_path / "home" / "default" / "decisions.jsonl"
    assert said[1].rstrip().endswith(f": advise; decisions in {path}"), said
    assert said[2] == "waiting: no worker is registered yet\n"
    assert path.exists() and "s3cret" not in "".join(said) + rest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "BATON_TOKEN"),
        (["--autoscaler-mode", "on"], "expected off or advise or act"),
        (["--autoscaler-prometheus-url", "ftp://h"], "http://[user:password@]host"),
        (["--autoscaler-decode-min", "3", "--autoscaler-decode-max", "2"], "3 is more than"),
        (["--autoscaler-gpus", "1"], "1 are less than the 2 workers"),
        (["--autoscaler-window-s", "6", "--autoscaler-interval-s", "9"], "6 s is less than"),
    ],
)
def test_invalid_autoscaler_settings_are_refused(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_TOKEN", "BATON_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["autoscale", *arguments])
    assert result.exit_code == 2
    assert says in result.output
