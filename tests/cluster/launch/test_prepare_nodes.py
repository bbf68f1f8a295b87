"""What nodes are asked before a deployment, and how long they may take; one downloads for real."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.doctor.finding import note, ok, problem
from cluster.launch import prepare_nodes
from cluster.launch.prepare_nodes import SILENT_S, NodeReport, follow_nodes, node_subject
from cluster.local.start_report import StartReporter
from cluster.models import locate
from cluster.serve.applications import ReplicaLayout
from cluster.serve.node_settings import ReplicaContext
from cluster.serve.ray_nodes import RayNode
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import StartupError
from tests.cluster.hub_server import Hub, files_of, serving

CPU = ReplicaLayout(ReplicaContext(None, 1.0, "a program"), gpus=0.0)
CUDA = ReplicaLayout(CPU.context, gpus=1.0)
TOKEN = "hf_known-only-to-acme"


def launched(prefill: int = 2, decode: int = 3) -> LaunchSettings:
    launch = assemble.launch_settings(Config(start_deadline_s=5.0))
    return msgspec.structs.replace(launch, prefill=prefill, decode=decode, model_path="owner/name")


def node(**resources: float) -> RayNode:
    return RayNode("id", "10.0.0.2", {"CPU": 8.0, **resources})


# ---- what a node is asked --------------------------------------------------------------------


def test_node_is_checked_for_the_workers_that_may_run_there() -> None:
    subject = node_subject(node(baton_prefill=1, baton_decode=8), launched(), CPU)
    assert subject is not None and subject.weights and subject.model == "owner/name"
    assert [(pool.role, pool.workers) for pool in subject.pools] == [("prefill", 1), ("decode", 3)]
    assert {pool.engine.device for pool in subject.pools} == {"cpu"}


def test_node_with_gpus_has_at_most_a_worker_for_each() -> None:
    subject = node_subject(node(baton_prefill=4, baton_decode=4, GPU=2), launched(), CUDA)
    assert subject is not None and subject.gpus == 2
    assert [(pool.role, pool.workers) for pool in subject.pools] == [("prefill", 1), ("decode", 1)]
    assert {pool.engine.device for pool in subject.pools} == {"cuda"}


@pytest.mark.parametrize("resources", [{"baton_router": 1}, {"baton_router": 1, "baton_decode": 1}])
def test_node_where_no_worker_can_run_needs_no_weights(resources: dict[str, float]) -> None:
    """The second one has no GPU, which every worker would need."""
    subject = node_subject(node(**resources), launched(), CUDA)
    assert subject is not None and subject.kind == "router" and not subject.weights


def test_node_that_takes_no_replicas_is_not_asked() -> None:
    assert node_subject(node(), launched(), CPU) is None
    assert node_subject(node(baton_prefill=1), launched(prefill=0), CPU) is None


# ---- following them --------------------------------------------------------------------------


class Tasks:
    """Nodes whose reports are written down; each poll takes ``step_s`` of the clock."""

    def __init__(self, step_s: float, **reports: Sequence[NodeReport | None]) -> None:
        self.now = 0.0
        self._step_s = step_s
        self._reports = {name: list(said) for name, said in reports.items()}

    @property
    def pending(self) -> list[str]:
        return [name for name, left in self._reports.items() if left]

    def poll(self, timeout_s: float) -> list[tuple[str, NodeReport]]:
        self.now += self._step_s
        said = [(name, self._reports[name].pop(0)) for name in self.pending]
        return [(name, report) for name, report in said if report is not None]


def reporter() -> tuple[StartReporter, io.StringIO]:
    out = io.StringIO()
    now = iter(range(0, 10**6, 60))
    return StartReporter(Console(file=out, width=200), lambda: float(next(now))), out


def test_download_may_take_any_time_while_bytes_arrive() -> None:
    hour = [NodeReport(done=part << 20, total=3600 << 20) for part in range(0, 3600, 30)]
    tasks, (report, out) = Tasks(30.0, a=hour, b=[NodeReport()]), reporter()
    last = follow_nodes(tasks, report, lambda: tasks.now)
    assert tasks.now > 10 * Config().start_deadline_s
    assert last["a"] == hour[-1]
    assert "downloading the model to a: " in out.getvalue()


def test_node_that_says_nothing_is_named() -> None:
    tasks = Tasks(1.0, a=[NodeReport()] * 90, b=[NodeReport(), *[None] * 90])
    with pytest.raises(StartupError, match=r"the node b has not reported for 60 s"):
        follow_nodes(tasks, reporter()[0], lambda: tasks.now)
    assert SILENT_S < tasks.now < SILENT_S + 5


def test_node_that_fails_is_named_at_once() -> None:
    stalled = NodeReport(error="model 'owner/name': the hub has sent nothing for 60 s")
    tasks = Tasks(1.0, a=[NodeReport()] * 90, b=[NodeReport(), stalled])
    with pytest.raises(StartupError, match=r"^the node b: model 'owner/name': the hub has sent"):
        follow_nodes(tasks, reporter()[0], lambda: tasks.now)
    assert tasks.now == 2.0


def test_findings_are_reported_by_node() -> None:
    old = problem("gpu", "the driver serves CUDA 12.4, torch needs 13.0", "a newer driver")
    fetch = note("model", "16 GiB to download")
    reports = {f"10.0.0.{i}": NodeReport(findings=(fetch, ok("gpu", "2"))) for i in range(1, 6)}
    report, out = reporter()
    prepare_nodes._judge(reports, report)
    assert "10.0.0.1, 10.0.0.2, 10.0.0.3 and 2 more: model: 16 GiB to download" in out.getvalue()
    reports["10.0.0.4"] = NodeReport(findings=(old,))
    with pytest.raises(StartupError, match=r"10\.0\.0\.4: gpu: the driver serves CUDA 12\.4"):
        prepare_nodes._judge(reports, report)


# ---- on a node -------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import msgspec
from cluster.doctor.subject import DoctorSubject
from cluster.launch import prepare_nodes
from cluster.models import download
if sys.argv[2:]:
    fetch = download.download_snapshot
    download.download_snapshot = lambda *asked: fetch(*asked, float(sys.argv[2]))
prepare_nodes._REPORT_S = 0.2
asked = DoctorSubject(kind=sys.argv[1], model="owner/name", gpus=0), True
print(msgspec.json.encode([list(prepare_nodes.check_node(asked)),
                           list(prepare_nodes.fetch_model(asked))]).decode())
sys.stdout.flush(); os._exit(0)
"""


def on_node(hub: Hub, home: Path, kind: str, *more: str) -> tuple[list[Any], list[Any], str]:
    """The reports of a node's checks and of its download, and all that it has written."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, *more],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | {"HF_TOKEN": TOKEN},
    )
    assert run.returncode == 0, run.stderr
    checked, fetched = json.loads(run.stdout)
    return checked, fetched, run.stdout + run.stderr


def test_node_of_routers_fetches_no_weights(tmp_path: Path) -> None:
    with serving(Hub(files_of(locate.demo_path()), token=TOKEN)) as hub:
        checked, fetched, shown = on_node(hub, tmp_path, "router")
    assert "to download in 4 files" in checked[0]["findings"][0]["text"]
    assert fetched[-1]["error"] == ""
    assert fetched[-1]["findings"][0]["level"] == "ok", "it is looked at again once it is there"
    assert "tokenizer.json" in hub.fetched
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    assert TOKEN not in shown


def test_node_of_workers_tells_its_progress(tmp_path: Path) -> None:
    hub = Hub(files_of(locate.demo_path()), token=TOKEN, slow="model.safetensors")
    with serving(hub):
        _, fetched, shown = on_node(hub, tmp_path, "worker")
    assert len({report["done"] for report in fetched}) > 3 and fetched[-1]["error"] == ""
    assert TOKEN not in shown


def test_node_without_access_and_silent_hub_are_told(tmp_path: Path) -> None:
    with serving(Hub(files_of(locate.demo_path()), token="hf_another")) as hub:
        checked, fetched, _ = on_node(hub, tmp_path, "worker")
    assert "is gated: accept its terms" in checked[0]["findings"][1]["text"], checked
    assert "is gated: accept its terms" in fetched[-1]["error"]
    with serving(Hub(files_of(locate.demo_path()), stalls="model.safetensors")) as hub:
        _, fetched, _ = on_node(hub, tmp_path, "worker", "1.0")
    assert "the hub has sent nothing for 1 s" in fetched[-1]["error"]
