"""`baton init`: what it makes is private, sourced by sh, and what Baton and Ray want."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config.resolve import CommandFlags, resolve_config
from cluster.credentials import certificates
from cluster.credentials.init import ClusterFolder, create_cluster_folder
from protocol.errors import StartupError
from protocol.security.certificates import certificate_hosts
from protocol.security.tls import TlsFiles, read_pem_bundle
from router.common.errors import ApiError
from router.tenants.key_store import KeyStore

PASSWORD = "p'q \"$HOME`id`\\/#%:@"
URL = "redis://us%2Fer:p%27q%20%22%24HOME%60id%60%5C%2F%23%25%3A%40@10.0.0.9/1"


def made(folder: Path, url: str = URL, hosts: tuple[str, ...] = ("10.0.0.1",)) -> ClusterFolder:
    return create_cluster_folder(folder, list(hosts), url, "acme", "baton.cluster")


def sourced(made: ClusterFolder, home: Path) -> dict[str, str]:
    """The environment of a process on a node, by sh."""
    home.mkdir()
    made.node.rename(home / "baton")
    command = ["sh", "-ec", "set -a; . ~/baton/node.env; set +a; exec env -0"]
    bare = {"HOME": str(home), "PATH": os.defpath}
    out = subprocess.run(command, env=bare, check=True, capture_output=True, text=True).stdout
    return dict(entry.partition("=")[::2] for entry in out.split("\0") if entry)


def test_all_files_are_private(tmp_path: Path) -> None:
    made(tmp_path / "c")
    found = {p.relative_to(tmp_path / "c"): p for p in (tmp_path / "c").rglob("*")}
    assert sorted(map(str, found)) == [
        *("ca.key", "ca.pem", "node", "node/api-keys.yaml", "node/baton.yaml", "node/ca.pem"),
        *("node/monitoring.key", "node/node.env", "node/node.key", "node/node.pem", "node/run"),
    ]
    assert found.pop(Path("node/run")).stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in found.values() if path.is_file()}
    folders = [tmp_path / "c", tmp_path / "c" / "node"]
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_sh_and_baton_read_node_env(tmp_path: Path) -> None:
    cluster = made(tmp_path / "c")
    home = tmp_path / "a home's"
    env = sourced(cluster, home)
    assert env["RAY_REDIS_ADDRESS"] == "redis://10.0.0.9:6379"
    assert (env["RAY_REDIS_USERNAME"], env["RAY_REDIS_PASSWORD"]) == ("us/er", PASSWORD)
    assert env["RAY_AUTH_MODE"] == "token" and len(env["RAY_AUTH_TOKEN"]) == 64
    config = resolve_config(CommandFlags(home / "baton" / "baton.yaml"), env).config
    assert config.redis.url and config.security.token and config.security.secret
    assert config.redis.url.get_secret_value() == URL.replace("10.0.0.9/", "10.0.0.9:6379/")
    tls = config.security.tls
    assert tls.name == "baton.cluster" and tls.ca and tls.cert and tls.key
    assert tls.ca == str(home / "baton" / "ca.pem")
    read_pem_bundle(TlsFiles(ca=tls.ca, cert=tls.cert, key=tls.key), time.time())
    assert config.security.http_tls.cert == tls.cert
    programs = home / "baton" / "src" / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "baton").symlink_to(Path(sys.executable).parent / "baton")
    command = ["sh", "-c", "~/baton/run baton config"]
    bare = {"HOME": str(home), "PATH": os.defpath}
    shown = subprocess.run(command, env=bare, check=True, capture_output=True, text=True).stdout
    assert "environment BATON_TLS_NAME" in shown and PASSWORD not in shown


def test_token_of_the_hub_travels_in_node_env(tmp_path: Path) -> None:
    token = "hf_it's $(secret)"
    folder = tmp_path / "c"
    cluster = create_cluster_folder(folder, ["h"], URL, "acme", "baton.cluster", token)
    assert sourced(cluster, tmp_path / "home")["HF_TOKEN"] == token
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "node.env"]
    assert not [path for path in others if token in path.read_text()]


def test_without_a_token_that_of_the_node_stays(tmp_path: Path) -> None:
    text = (made(tmp_path / "c").node / "node.env").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("HF_TOKEN=")]
    command = ["sh", "-uc", f"{line}; printf %s $HF_TOKEN"]
    for own in ("", "hf_of-the-node"):
        env = {"PATH": os.defpath, **({"HF_TOKEN": own} if own else {})}
        run = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        assert run.stdout == own


def test_two_clusters_share_no_secret(tmp_path: Path) -> None:
    one, other = (sourced(made(tmp_path / n), tmp_path / f"home-{n}") for n in ("a", "b"))
    drawn = {
        *("BATON_TOKEN", "BATON_SECRET", "BATON_API_KEY", "RAY_AUTH_TOKEN"),
        "RAY_external_storage_namespace",
    }
    assert {name for name in drawn if one[name] == other[name]} == set()


def test_a_certificate_for_all_nodes_which_is_renewed(tmp_path: Path) -> None:
    node = made(tmp_path / "c", hosts=("10.0.0.1", "llm.example")).node
    for _ in range(2):
        cert = x509.load_pem_x509_certificate((node / "node.pem").read_bytes())
        assert sorted(certificate_hosts(cert)) == ["10.0.0.1", "baton.cluster", "llm.example"]
        paths = [str(node / name) for name in ("ca.pem", "node.pem", "node.key")]
        read_pem_bundle(TlsFiles(ca=paths[0], cert=paths[1], key=paths[2]), time.time())
        certificates.renew_node_certificate(tmp_path / "c", "node/node")


def test_api_keys_of_the_tenant_and_of_monitoring(tmp_path: Path) -> None:
    cluster = made(tmp_path / "c")
    keys = KeyStore(str(cluster.node / "api-keys.yaml"))
    watching = (cluster.node / "monitoring.key").read_text()
    assert keys.authenticate(f"Bearer {cluster.api_key}", "generate").name == "acme"
    assert keys.authenticate(f"Bearer {watching}", "monitor").name == "monitoring"
    for key, scope in ((watching, "generate"), (cluster.api_key, "monitor")):
        with pytest.raises(ApiError, match=f"scope '{scope}'"):
            keys.authenticate(f"Bearer {key}", scope)
    everything = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert cluster.api_key not in everything, "it is shown once, and kept nowhere"
    assert sourced(cluster, tmp_path / "home")["BATON_API_KEY"] == watching


def test_files_named_in_the_redis_url_are_copied(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path / "redis", ["10.0.0.9"])
    ca, cert, key = (tmp_path / "redis" / n for n in ("ca.pem", "10.0.0.9.pem", "10.0.0.9.key"))
    options = f"ssl_ca_certs={ca}&health_check_interval=5&ssl_certfile={cert}&ssl_keyfile={key}"
    home = tmp_path / "home"
    cluster = made(tmp_path / "c", f"rediss://10.0.0.9:6380/0?{options}")
    env = sourced(cluster, home)
    there = {n: home / "baton" / f"redis-{n}.pem" for n in ("ca", "cert", "key")}
    assert [there[n].read_bytes() for n in there] == [p.read_bytes() for p in (ca, cert, key)]
    assert env["BATON_REDIS_URL"] == (
        f"rediss://10.0.0.9:6380/0?health_check_interval=5&ssl_ca_certs={there['ca']}"
        f"&ssl_certfile={there['cert']}&ssl_keyfile={there['key']}"
    )
    assert env["RAY_REDIS_ADDRESS"] == "rediss://10.0.0.9:6380"
    assert env["RAY_REDIS_CA_CERT"] == str(there["ca"])


def test_redis_with_a_public_ca_uses_the_systems_cas(tmp_path: Path) -> None:
    env = sourced(made(tmp_path / "c", "rediss://:p@redis.example.com"), tmp_path / "home")
    assert env["RAY_REDIS_ADDRESS"] == "rediss://redis.example.com:6379"
    assert env["RAY_REDIS_CA_CERT"] == "/etc/ssl/certs/ca-certificates.crt"


BAD = {
    "redis://:p@127.0.0.1:6379": "every node reaches",
    "unix:///run/redis.sock": "every node reaches",
    "redis://10.0.0.9": "must require a password",
    "http://:p@10.0.0.9": "the Redis URL cannot be used",
    "rediss://:p@10.0.0.9?ssl_ca_certs=/nowhere/ca.pem": "ssl_ca_certs: cannot read /nowhere",
}


@pytest.mark.parametrize("url", BAD)
def test_redis_that_nodes_cannot_use_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=BAD[url]):
        made(tmp_path / "c", url)
    assert not (tmp_path / "c").exists()


def test_invalid_options_write_nothing(tmp_path: Path) -> None:
    cases = {
        "--host must be": {"hosts": ["a b"]},
        "--name must be": {"name": "10.0.0.1"},
        "--tenant must not be": {"tenant": "monitoring"},
    }
    good = {"hosts": ["h"], "redis_url": URL, "tenant": "acme", "name": "n"}
    for said, change in cases.items():
        with pytest.raises(StartupError, match=said):
            create_cluster_folder(tmp_path / "c", **{**good, **change})  # type: ignore[arg-type]
        assert not (tmp_path / "c").exists()
    (tmp_path / "file").write_text("")
    for there in (tmp_path, tmp_path / "file"):
        with pytest.raises(StartupError, match="exists already"):
            made(there)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_init_command_prints_the_next_steps(tmp_path: Path) -> None:
    command = ["init", str(tmp_path / "c"), "--host", "llm.example", "--redis-url", URL]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert found.output.count("sk-") == 1
    assert f"--cacert {tmp_path}/c/ca.pem https://llm.example:8000" in found.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "exists already" in again.output
    assert PASSWORD not in found.output and "%27q" not in found.output + again.output


def test_written_configuration_is_valid(tmp_path: Path) -> None:
    path = made(tmp_path / "c").node / "baton.yaml"
    config = resolve_config(CommandFlags(path), {}).config
    assert (config.pools.prefill.workers, config.router.port) == (1, 8000)
    assert set(yaml.safe_load(path.read_text())) == {"model", "pools", "router"}
