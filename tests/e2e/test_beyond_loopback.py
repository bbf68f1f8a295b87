"""`baton up` for everybody: HTTPS and API keys in front, mutual TLS inside, loopback for the rest;
and no secret anywhere that others could read it."""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from bench.lib.local_cluster import LocalCluster, baton, local_cluster
from cluster.credentials import certificates

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(180)]

KEY = "sk-this-is-known-to-one-tenant-only"
BODY = {"model": "baton-demo", "prompt": [5] * 300, "max_tokens": 4}


TLS_FILES = {"ca": "ca.pem", "cert": "localhost.pem", "key": "localhost.key"}


class Open(NamedTuple):
    cluster: LocalCluster
    folder: Path

    def client(self, key: str | None = None) -> httpx.Client:
        url = self.cluster.url.replace("0.0.0.0", "localhost")
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=url, verify=context, headers=headers, timeout=30)


@pytest.fixture(scope="module")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("tls")
    certificates.create_ca(folder, [])
    keys = folder / "keys.yaml"
    keys.write_text(f"{KEY}: {{tenant: acme, scopes: [generate, monitor]}}\n")
    keys.chmod(0o600)
    cert, key = str(folder / "localhost.pem"), str(folder / "localhost.key")
    with local_cluster(
        *("--host", "0.0.0.0", "--threads", "1", "--api-keys", str(keys)),
        *("--http-tls-cert", cert, "--http-tls-key", key),
        *("--tls-ca", str(folder / "ca.pem"), "--tls-cert", cert, "--tls-key", key),
    ) as running:
        yield Open(running, folder)


def test_status_of_this_machine_needs_neither_url_nor_ca(
    everybody: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", KEY)
    tls = [f"--tls-{name}={everybody.folder / file}" for name, file in TLS_FILES.items()]
    shown = json.loads(baton(everybody.cluster.home, "status", "--json", *tls))
    assert shown["router"]["ready"] == {"prefill": 1, "decode": 1}


def test_completions_for_those_with_a_key(everybody: Open) -> None:
    with everybody.client(KEY) as client:
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        page = client.get("/metrics").text
        found = client.get("/sd").json()
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert sorted(group["labels"]["__meta_baton_role"] for group in found) == [
        *("decode", "prefill", "router")
    ]
    assert KEY not in page


@pytest.mark.parametrize("key", [None, "wrong"])
def test_others_learn_that_it_lives(everybody: Open, key: str | None) -> None:
    with everybody.client(key) as client:
        for path in ("/v1/models", "/metrics", "/sd"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/v1/completions", json=BODY).status_code == 401
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_no_plain_http(everybody: Open) -> None:
    url = everybody.cluster.url.replace("https", "http").replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health", timeout=5)


def test_only_the_router_listens_beyond_loopback(everybody: Open) -> None:
    port = int(everybody.cluster.url.rpartition(":")[2])
    beyond, inside = set(), 0
    for process in everybody.cluster.processes():
        for socket in process.net_connections("inet"):
            if socket.status == psutil.CONN_LISTEN:
                if _is_loopback(socket.laddr.ip):
                    inside += 1
                else:
                    # Ray puts the method behind the name while one runs.
                    beyond.add((process.name().partition(".")[0], socket.laddr.port))
    assert beyond == {("ray::ServeReplica:baton-router:Router", port)}
    assert inside > 10


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def test_no_secret_where_others_could_read_it(everybody: Open) -> None:
    """Command lines, the log, and what is world-readable in the run folder."""
    processes = everybody.cluster.processes()
    secrets = {KEY, *_drawn(processes)}
    assert len(secrets) == 4  # with the cluster's token and secret, and Ray's token
    shown = " ".join(word for process in processes for word in process.cmdline())
    run_dir = Path(everybody.cluster.state.run_dir)
    assert run_dir.stat().st_mode & 0o077 == 0
    logs = [everybody.cluster.home / "default/baton.log", *run_dir.glob("ray/session_2*/logs/*")]
    for path in logs:
        if path.is_file():
            shown += path.read_text(errors="replace")
    assert len(shown) > 10_000
    for secret in secrets:
        assert secret not in shown


def _drawn(processes: list[psutil.Process]) -> set[str]:
    names = ("BATON_TOKEN", "BATON_SECRET", "RAY_AUTH_TOKEN")
    replica = next(p for p in processes if "PrefillWorker" in " ".join(p.cmdline()))
    return {replica.environ()[name] for name in names}
