"""deploy/ray-*.yaml: Ray takes them, what they name exists, and nothing of them is open."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.credentials.init import create_cluster_folder
from cluster.serve.replica_kinds import SCALABLE_KINDS, resource_name
from tests.deploy.commands import (
    DEPLOY,
    ROOT,
    baton_calls,
    check_baton,
    check_ray_start,
    check_shell,
    ray_starts,
)

FILES = sorted(DEPLOY.glob("ray-*.yaml"))
CLOUDS = [path for path in FILES if path.name != "ray-local.yaml"]
IDS = [path.stem for path in FILES]
RAYS_OWN = {"RAY_HEAD_IP", "RAY_CLOUD_INSTANCE_ID"}
"""Variables that the autoscaler sets."""


def config(path: Path) -> dict[str, Any]:
    """As Ray has it before it asks a cloud for anything."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(yaml.safe_load(path.read_text())))
    return prepared


def starts(path: Path) -> list[list[str]]:
    made = config(path)
    return [made["head_start_ray_commands"], made["worker_start_ray_commands"]]


pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "c"
    return create_cluster_folder(folder, ["h"], "redis://:p@10.0.0.9", "acme", "baton.cluster").node


def test_all_cluster_files_are_tested() -> None:
    assert IDS == ["ray-aws", "ray-gcp", "ray-local"]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_ray_accepts_the_file(path: Path) -> None:
    validate_config(config(path))


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_commands_in_the_comments_exist(path: Path) -> None:
    made = config(path)
    for name in ("head_setup_commands", "worker_setup_commands"):
        assert made[name]
        check_shell("\n".join(made[name]))
    for commands in starts(path):
        check_shell("\n".join(commands))
    calls = baton_calls(path.read_text())
    assert "init" in {words[0] for words in calls}
    for words in calls:
        check_baton(words)


@pytest.mark.parametrize("path", CLOUDS, ids=[path.stem for path in CLOUDS])
def test_clouds_nodes_can_launch_kernels(path: Path) -> None:
    [install] = [line for line in config(path)["setup_commands"] if "apt-get" in line]
    assert {"gcc", "python3-dev"} <= set(install.split())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_ray_starts_closed_and_fault_tolerant(path: Path, node: Path) -> None:
    """With the node's environment, which has token authentication and the Redis of the head."""
    given = set(re.findall(r"^(\w+)=", (node / "node.env").read_text(), re.M))
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS"} <= given
    head, worker = starts(path)
    for commands in (head, worker):
        [words] = ray_starts(commands)
        parsed = check_ray_start(words)
        assert parsed["dashboard_host"] in ("127.0.0.1", "localhost")
        text = "\n".join(commands)
        assert text.index(". ~/baton/node.env") < text.index("ray start --")
        assert re.search(r"set -a; *\. ~/baton/node\.env", text)
        assert set(re.findall(r"\$\{?(RAY_\w+)", text)) <= given | RAYS_OWN
    assert '--redis-password="$RAY_REDIS_PASSWORD"' in "\n".join(head)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_named_files_are_copied_to_nodes(path: Path, node: Path) -> None:
    made = config(path)
    assert list(made["file_mounts"]) == ["~/baton"]
    text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.M)
    for name in set(re.findall(r"~/baton/([\w./-]+)", text)):
        if name == "src" or name.startswith("src/.venv"):
            continue
        where = ROOT / name.removeprefix("src/") if name.startswith("src") else node / name
        assert where.exists(), name
    for target in re.findall(r"make -C ~/baton/src (\S+)", text):
        assert f"$(VENV){target.removeprefix('.venv')}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", CLOUDS, ids=[path.stem for path in CLOUDS])
def test_node_types_declare_their_resources(path: Path) -> None:
    types = config(path)["available_node_types"]
    takes = {
        name: {k for k in SCALABLE_KINDS if resource_name(k) in types[name]["resources"]}
        for name in types
    }
    assert takes == {
        "head": {"router"},
        "prefill": {"prefill", "router"},
        "decode": {"decode", "router"},
    }
    assert config(path)["head_node_type"] == "head"
    for name in ("prefill", "decode"):
        assert 0 < types[name]["min_workers"] < types[name]["max_workers"]


def test_aws_nodes_are_in_a_group_of_the_users() -> None:
    """Ray leaves that as it is; one that it makes lets everybody in by SSH."""
    made = config(DEPLOY / "ray-aws.yaml")
    assert "security_group" not in made["provider"]
    for kind in made["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"]
        assert kind["node_config"]["MetadataOptions"] == {"HttpTokens": "required"}


def test_gcp_nodes_are_in_a_network_of_their_own() -> None:
    made = config(DEPLOY / "ray-gcp.yaml")
    for kind in made["available_node_types"].values():
        assert kind["node_config"]["tags"] == {"items": ["baton"]}
        for interface in kind["node_config"]["networkInterfaces"]:
            assert interface["subnetwork"].endswith("/subnetworks/baton")


def test_watch_listens_on_loopback() -> None:
    path = DEPLOY / "watch.sh"
    text = path.read_text()
    check_shell(text)
    assert "--web.listen-address=127.0.0.1:9090" in text
    assert '--config="$watch/grafana/grafana.ini"' in text  # which says loopback
    [words] = [words for words in baton_calls(text) if words[0] == "monitoring"]
    check_baton(words)
