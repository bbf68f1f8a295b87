"""A pool as strangers would run it, and the real Prometheus that watches it.

Where the machine has an address beyond loopback, everything listens there: HTTPS and API keys in
front, mutual TLS inside. The second router has objectives that nobody meets, and room for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos import BUSY_ROUTER
from bench.standalone import Standalone
from cluster import certs
from cluster.config.schema import Config
from cluster.monitoring.command import Wanted, watched
from cluster.monitoring.windows import Windows
from cluster.monitoring.write import Rules, write_prometheus
from cluster.ports import any_free
from tests.system import program

NAME = "baton.cluster"
KEY = "sk-of-whoever-asks"
WELL, STRICT = 0, 1
"""The routers by number."""


def address() -> str:
    """Where this machine is known by to others; loopback where it knows no way to any."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.99", 9))  # of documentation, RFC 5737; nothing is sent
        return str(asked.getsockname()[0])
    return "127.0.0.1"


class WatchedPool(Standalone):
    """One worker of each role, with little room for KV; two routers."""

    def __init__(self, folder: Path) -> None:
        self.host = address()
        self.files = _certificates(folder / "certs", self.host)
        keys = folder / "keys.yaml"
        keys.write_text(json.dumps({KEY: "clients"}))
        keys.chmod(0o600)
        tls = (*_flags("tls", self.files), "--tls-name", NAME)
        https = _flags("http-tls", {k: v for k, v in self.files.items() if k != "ca"})
        super().__init__(
            folder,
            roles=("prefill", "decode"),
            worker_options=("--host", self.host, "--kv-tokens", "2560", *tls),
            router_options=(
                *("--host", self.host, "--metrics-host", self.host, "--api-keys", str(keys)),
                *("--ttft-slo-ms", "30000", "--tpot-slo-ms", "5000"),
                *BUSY_ROUTER,
                *tls,
                *https,
            ),
            routers=2,
        )

    @property
    def urls(self) -> list[str]:
        return [f"https://{self.host}:{port}" for port in self._ports]

    def _router(self, port: int) -> subprocess.Popen[bytes]:
        options = [*self._router_options]
        if port == self._ports[STRICT]:
            options += ["--ttft-slo-ms", "1", "--tpot-slo-ms", "1", "--max-requests", "1"]
        return self._baton("router", "--port", str(port), *options)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        """With the key, and trust in the cluster's CA."""
        trust = ssl.create_default_context(cafile=self.files["ca"])
        connector = aiohttp.TCPConnector(limit=0, ssl=trust)
        headers = {"authorization": f"Bearer {KEY}"}
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout
        ) as session:
            yield session

    async def attached(self, session: aiohttp.ClientSession) -> int:
        async with self.client() as own:
            return min([await _attached(own, url) for url in self.urls])

    async def mend_no_more(self) -> None:
        """Who dies from now on stays dead."""
        assert self._mending is not None
        self._mending.cancel()
        await asyncio.wait([self._mending])

    def config(self) -> Config:
        """What `baton monitoring` would have from the flags."""
        https = {name: path for name, path in self.files.items() if name != "ca"}
        tls = self.files | {"name": NAME}
        return Config.model_validate({"security": {"tls": tls, "http_tls": https}})


async def _attached(session: aiohttp.ClientSession, url: str) -> int:
    try:
        async with session.get(f"{url}/ready") as response:
            return int((await response.json()).get("decode_workers", 0))
    except aiohttp.ClientError:
        return 0


def _certificates(folder: Path, host: str) -> dict[str, str]:
    """For the pool's name and host, by their keys in the configuration; they end in a day."""
    days, certs.NODE_DAYS = certs.NODE_DAYS, 1
    try:
        certs.init(folder, [NAME, host])
    finally:
        certs.NODE_DAYS = days
    files = {"ca": "ca.pem", "cert": f"{NAME}.pem", "key": f"{NAME}.key"}
    return {name: str(folder / file) for name, file in files.items()}


def _flags(prefix: str, files: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for name, path in files.items() for word in (f"--{prefix}-{name}", path))


class Prometheus:
    """The real one, with what `baton monitoring` writes, but for ``scale``: of the rules' windows.
    Looks once a second."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str, **parameters: str) -> Any:
        """``data`` of an answer of its API."""
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        data = await self.get("query", query=expr)
        return data["result"] if data["resultType"] == "vector" else [{"value": data["result"]}]

    async def firing(self) -> set[tuple[str, str]]:
        """(name, severity) of alerts."""
        data = await self.get("alerts")
        labels = [alert["labels"] for alert in data["alerts"] if alert["state"] == "firing"]
        return {(each["alertname"], each["severity"]) for each in labels}


@contextlib.contextmanager
def prometheus(pool: WatchedPool, folder: Path, scale: float) -> Iterator[str]:
    """Its URL, on loopback."""
    made = watched(Wanted(urls=tuple(pool.urls), interval_s=1), pool.config())
    write_prometheus(folder, made, Rules(windows=Windows(scale)), KEY)
    [port] = any_free("127.0.0.1", 1)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)
