"""Nodes of a real Ray fetch a gated model from a slow hub, with the token of their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import run_state
from cluster.local.processes import RUN_DIR_VARIABLE, kill_run_processes
from cluster.models import locate
from tests.cluster.hub_server import Hub, files_of, serving

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(180)]

TOKEN = "hf_known-only-to-acme"
DEADLINE_S = 4.0
SCRIPT = """
import os, sys
from pathlib import Path
import msgspec, psutil
from cluster.serve import ray_runtime
ray_runtime.prepare_environment(Path(sys.argv[1]))
ray_runtime.start_ray(Path(sys.argv[1]), gpus=0)
token = os.environ.pop("HF_TOKEN")  # the nodes have it; who deploys does not
from cluster.config import assemble
from cluster.config.schema import Config
from cluster.launch.prepare_nodes import prepare_nodes
from cluster.local.start_report import StartReporter
from cluster.serve.applications import ReplicaLayout
from cluster.serve.node_settings import ReplicaContext
from protocol.errors import StartupError
launch = assemble.launch_settings(Config(start_deadline_s=float(sys.argv[2])))
launch = msgspec.structs.replace(launch, model_path="owner/name")
layout = ReplicaLayout(ReplicaContext(None, 1.0, "a program"), 0.0)
with StartReporter() as report:
    try:
        prepare_nodes(launch, layout, report, memory=False)
    except StartupError as error:
        print("failed:", error)
lines = [process.cmdline() for process in psutil.Process().children(recursive=True)]
print(f"{len(lines)} command lines", "with the token" * (token in str(lines)), flush=True)
os._exit(0)
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = run_state.new_run_dir()
    yield folder
    kill_run_processes(folder)
    run_state.remove_run_dir(folder)


def prepared(hub: Hub, run_dir: Path, token: str) -> str:
    """What is printed, and all that Ray's processes have logged."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RAY_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(run_dir / "hub"), "HF_TOKEN": token}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), str(DEADLINE_S)],
        env=environment | {"HF_HUB_DISABLE_XET": "1", RUN_DIR_VARIABLE: str(run_dir)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    logs = [path for path in (run_dir / "ray").glob("session_2*/logs/**/*") if path.is_file()]
    assert len(logs) > 5
    return "\n".join([run.stdout, run.stderr, *(p.read_text(errors="replace") for p in logs)])


def test_slow_download_is_waited_for_and_the_token_stays_unseen(run_dir: Path) -> None:
    hub = Hub(
        files_of(locate.demo_path()),
        token=TOKEN,
        slow="model.safetensors",
        parts=20,
        pause_s=2.5 * DEADLINE_S / 20,
    )
    with serving(hub):
        shown = prepared(hub, run_dir, TOKEN)
    assert "1 checked; the model is on 1 for workers" in shown, shown[:3000]
    assert "model: owner/name: 11 MiB to download" in shown
    assert sorted(hub.fetched) == sorted(set(hub.fetched)) and "model.safetensors" in hub.fetched
    assert "command lines" in shown and "with the token" not in shown
    assert TOKEN not in shown


def test_node_without_access_stops_the_deployment(run_dir: Path) -> None:
    with serving(Hub(files_of(locate.demo_path()), token=TOKEN)) as hub:
        shown = prepared(hub, run_dir, "hf_of-somebody-else")
    assert "failed: 1 problem" in shown
    assert "127.0.0.1: model: model 'owner/name' is gated: accept its terms" in shown
    assert not hub.fetched
