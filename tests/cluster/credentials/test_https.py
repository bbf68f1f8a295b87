"""`baton router` over HTTPS, and where it refuses to listen."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.credentials import certificates
from cluster.local.ports import free_ports

SECRET = {"BATON_TOKEN": "7" * 32, "BATON_SECRET": "ab" * 32}


def command(*options: str) -> list[str]:
    redis = ("--redis-url", "redis://127.0.0.1:1/0")
    return [sys.executable, "-m", "cluster.cli.main", "router", *redis, *options]


@contextlib.contextmanager
def router(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*options), env=os.environ | SECRET, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        assert process.stdout is not None
        process.stdout.close()


def health(url: str, ca: str, within_s: float = 20.0) -> int:
    """The status of /health, once somebody answers there."""
    context = ssl.create_default_context(cafile=ca)
    end = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5, context=context) as reply:
                return int(reply.status)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError) or time.monotonic() > end:
                raise
        time.sleep(0.1)


def test_https_and_its_renewal(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path, [])
    certificates.create_ca(tmp_path / "other", [])
    [port] = free_ports("127.0.0.1", 1)
    tls = ("--http-tls-cert", str(tmp_path / "localhost.pem"))
    key = ("--http-tls-key", str(tmp_path / "localhost.key"))
    url, ca = f"https://localhost:{port}", str(tmp_path / "ca.pem")
    with router("--port", str(port), *tls, *key) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"router: https://127.0.0.1:{port}\n"
        assert health(url, ca) == 200
        for name in ("localhost.pem", "localhost.key"):
            (tmp_path / "other" / name).replace(tmp_path / name)
        end = time.monotonic() + 20
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            while time.monotonic() < end:
                health(url, ca)
                time.sleep(0.5)
        assert health(url, str(tmp_path / "other" / "ca.pem")) == 200


def refusal(*options: str) -> str:
    done = subprocess.run(
        command(*options), env=os.environ | SECRET, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert not any(secret in done.stdout + done.stderr for secret in SECRET.values())
    return " ".join((done.stdout + done.stderr).split())


def test_refusals(tmp_path: Path) -> None:
    said = refusal("--host", "0.0.0.0")
    assert "API keys" in said and "certificate for HTTPS" in said
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-one: acme\n")
    keys.chmod(0o600)
    said = refusal("--host", "0.0.0.0", "--api-keys", str(keys))
    assert "certificate for HTTPS" in said and "a file of API keys" not in said
    keys.chmod(0o644)
    said = refusal("--allow-plain-http", "--host", "0.0.0.0", "--api-keys", str(keys))
    assert "chmod 600" in said and "sk-one" not in said
