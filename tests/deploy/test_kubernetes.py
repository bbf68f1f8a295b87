"""deploy/kuberay*.yaml: fields that KubeRay and Kubernetes have, and what its command comes to."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.credentials.init import create_cluster_folder
from cluster.serve.replica_kinds import SCALABLE_KINDS, resource_name
from tests.deploy.commands import DEPLOY, ROOT, baton_calls, check_baton, check_ray_start

PATH = DEPLOY / "kuberay.yaml"
PASSWORD = "a b*$x'\"\\c"

SPEC = {"rayVersion", "authOptions", "gcsFaultToleranceOptions", "headGroupSpec"}
SPEC |= {"workerGroupSpecs"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
POD = {"enableServiceLinks", "automountServiceAccountToken", "terminationGracePeriodSeconds"}
POD |= {"securityContext", "containers", "volumes", "nodeSelector", "tolerations"}
CONTAINER = {"name", "image", "command", "args", "securityContext", "resources", "ports"}
CONTAINER |= {"readinessProbe", "livenessProbe", "volumeMounts"}
"""Names of fields of ray.io/v1 (KubeRay 1.6) and v1, as far as they are used."""


pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(PATH.read_text())}


@pytest.fixture(scope="module")
def groups(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    spec = documents["RayCluster"]["spec"]
    return {"head": spec["headGroupSpec"]} | {g["groupName"]: g for g in spec["workerGroupSpecs"]}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home, with the mounted folder in it."""
    home = tmp_path_factory.mktemp("home")
    made = create_cluster_folder(home / "c", ["h"], "redis://:p@10.0.0.9", "acme", "baton.cluster")
    made.node.rename(home / "baton")
    return home / "baton"


def container(group: dict[str, Any]) -> dict[str, Any]:
    [only] = group["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_only_known_fields_are_used(
    documents: dict[str, dict[str, Any]], groups: dict[str, dict[str, Any]]
) -> None:
    cluster = documents["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert set(cluster["spec"]) == SPEC
    for group in groups.values():
        assert set(group) <= GROUP
        assert set(group["template"]["spec"]) <= POD
        assert set(container(group)) == CONTAINER
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pins = (ROOT / "requirements.in").read_text()
    assert f"ray=={cluster['spec']['rayVersion']}\n" in pins


def test_token_and_fault_tolerance_are_declared(documents: dict[str, dict[str, Any]]) -> None:
    spec = documents["RayCluster"]["spec"]
    secret = spec["authOptions"]["secretName"]
    assert spec["authOptions"]["mode"] == "token"
    options = spec["gcsFaultToleranceOptions"]
    key = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": secret, "key": "redis_password"}
    text = PATH.read_text()
    assert f"generic {secret}" in text
    for literal in ("auth_token", key["key"]):  # KubeRay reads the first by that name
        assert f"--from-literal={literal}=" in text


def test_each_group_declares_its_resource(groups: dict[str, dict[str, Any]]) -> None:
    assert set(groups) == {"head", *SCALABLE_KINDS}
    for kind in SCALABLE_KINDS:
        params = groups[kind]["rayStartParams"]
        assert yaml.safe_load(yaml.safe_load(params["resources"])) == {resource_name(kind): 1}
    for role in ("prefill", "decode"):
        assert container(groups[role])["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert groups[role]["minReplicas"] < groups[role]["maxReplicas"]


def test_pods_have_no_rights(groups: dict[str, dict[str, Any]]) -> None:
    for group in groups.values():
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container(group)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        [secret] = [v["secret"] for v in pod["volumes"] if "secret" in v]
        assert secret["defaultMode"] & 0o007 == 0
    uid = groups["head"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {uid}:" in (ROOT / "Dockerfile").read_text()


def test_caches_are_mounted_where_the_image_has_folders_of_its_user(
    groups: dict[str, dict[str, Any]],
) -> None:
    image = (ROOT / "Dockerfile").read_text()
    [kernels] = re.findall(r"^ENV TRITON_CACHE_DIR=(.*)$", image, re.M)
    _, _, as_user = image.rpartition("\nUSER 1000:1000\n")
    [models] = re.findall(r'^RUN mkdir -p (\S+) "\$TRITON_CACHE_DIR"$', as_user, re.M)
    for group in groups.values():
        mounts = {m["mountPath"]: m["name"] for m in container(group)["volumeMounts"]}
        assert {kernels, f"/home/baton/{models}"} < set(mounts)
        assert set(mounts.values()) == {v["name"] for v in group["template"]["spec"]["volumes"]}


def test_only_routers_are_reached(
    documents: dict[str, dict[str, Any]], groups: dict[str, dict[str, Any]]
) -> None:
    name = documents["RayCluster"]["metadata"]["name"]
    assert documents["Service"]["spec"]["selector"] == {
        "ray.io/cluster": name,
        "ray.io/group": "router",
    }
    probe = container(groups["router"])["readinessProbe"]["httpGet"]
    [port] = documents["Service"]["spec"]["ports"]
    assert probe == {"scheme": "HTTPS", "path": "/ready", "port": port["targetPort"]}
    ingress = documents["NetworkPolicy"]["spec"]["ingress"]
    assert [rule["ports"] for rule in ingress if "from" not in rule] == [
        [{"protocol": "TCP", "port": port["targetPort"]}]
    ]
    for group in groups.values():
        assert group["rayStartParams"]["dashboard-host"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["head", *SCALABLE_KINDS])
def test_ray_start_command_is_expanded(
    name: str, groups: dict[str, dict[str, Any]], node: Path, tmp_path: Path
) -> None:
    """With a start command as KubeRay makes them, and a password that is hard on a shell."""
    programs = tmp_path / "bin"
    programs.mkdir()
    ray = programs / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\nenv -0\n')
    ray.chmod(0o700)
    params = groups[name]["rayStartParams"] | {"redis-password": "$REDIS_PASSWORD"}
    generated = " ".join(f"--{key}={value}" for key, value in sorted(params.items()))
    env = {
        "HOME": str(node.parent),
        "PATH": f"{programs}{os.pathsep}{os.defpath}",
        "KUBERAY_GEN_RAY_START_CMD": f"ray start --block {generated}",
        "REDIS_PASSWORD": PASSWORD,
        "RAY_external_storage_namespace": "of-the-operator",
    }
    command = container(groups[name])["command"]
    assert command == ["tini", "--", "bash", "-c"]
    done = subprocess.run(
        [*command[2:], *container(groups[name])["args"]], env=env, capture_output=True, text=True
    )
    words = done.stdout.split("\0")
    assert f"--redis-password={PASSWORD}" in words, done.stderr
    if name != "head":
        assert f'--resources={{"baton_{name}": 1}}' in words
    check_ray_start([word for word in words if word.startswith("--")])
    assert f"BATON_TLS_CA={node}/ca.pem" in words
    assert "RAY_external_storage_namespace=of-the-operator" in words


def test_every_key_of_the_secret_is_a_file(
    documents: dict[str, dict[str, Any]], node: Path
) -> None:
    scrape = (DEPLOY / "kuberay-prometheus.yaml").read_text()
    keys = re.findall(r"name: baton-node, key: ([\w.-]+)", scrape)
    assert keys
    for key in keys:
        assert (node / key).is_file(), key


def test_scrape_config_matches_prometheus_yml(node: Path) -> None:
    there = yaml.safe_load((DEPLOY / "kuberay-prometheus.yaml").read_text())["spec"]
    [here] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())[
        "scrape_configs"
    ]
    told = [
        {re.sub(r"([A-Z])", r"_\1", key).lower(): value for key, value in each.items()}
        for each in there["relabelings"]
    ]
    assert told == here["relabel_configs"]
    assert there["jobName"] == here["job_name"]
    assert f"BATON_TLS_NAME={there['tlsConfig']['serverName']}\n" in (node / "node.env").read_text()


def test_commands_in_the_comments_exist() -> None:
    calls = baton_calls(PATH.read_text())
    assert {words[0] for words in calls} == {"init", "up"}
    for words in calls:
        check_baton(words)
