"""A pool as strangers would run it, and those who ask it.

Where the machine has an address beyond loopback, everything listens there: HTTPS and API keys in
front, mutual TLS inside. The second router has objectives that nobody meets, and room for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from bench.lib.oracle import BUSY_ROUTER
from bench.lib.standalone import Standalone
from cluster.autoscale.loans import request_role_change
from cluster.config.schema import Config
from cluster.credentials import certificates
from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.errors import Unavailable
from protocol.security.tls import TlsFiles

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
    """One worker of each role, with little room for KV; two routers, and an autoscaler, whose
    objectives are met, and which has the workers that it wants, until ``want_too_much``."""

    def __init__(self, folder: Path) -> None:
        self.host = address()
        self.files = _certificates(folder / "certs", self.host)
        keys = folder / "keys.yaml"
        keys.write_text(json.dumps({KEY: {"tenant": "clients", "scopes": ["admin"]}}))
        keys.chmod(0o600)
        tls = (*_flags("tls", self.files), "--tls-name", NAME)
        self._folder = folder
        self._scaler: subprocess.Popen[bytes] | None = None
        self._scaler_options = (
            *("--autoscaler-mode", "act", "--autoscaler-interval-s", "1"),
            *("--autoscaler-window-s", "15"),
            *("--autoscaler-log", str(folder / "decisions.jsonl")),
            *("--metrics-host", self.host, *tls),
        )
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

    async def start(self) -> None:
        await super().start()
        self._scale("--ttft-slo-ms", "30000", "--tpot-slo-ms", "5000")

    async def close(self) -> None:
        self.scale_no_more()
        await super().close()

    def want_too_much(self) -> None:
        """From now on the autoscaler has an objective that nobody meets, and wants a second prefill
        worker, which nobody starts."""
        self.scale_no_more()
        self._scale("--ttft-slo-ms", "1", "--autoscaler-prefill-min", "2")

    def scale_no_more(self) -> None:
        """Kill -9 the autoscaler."""
        if self._scaler is not None:
            self._scaler.kill()
            self._scaler.wait()
            self._scaler = None

    def _scale(self, *objectives: str) -> None:
        self._scaler = self._baton("autoscale", *self._scaler_options, *objectives)

    async def lend(self) -> None:
        """The prefill worker decodes for a moment; who sends it home is the same to it."""
        [record] = [r for r in await self.records() if r.role == "prefill"]
        tls = TlsFiles(**self.files, name=NAME)
        for role in ("decode", "prefill"):
            with contextlib.suppress(Unavailable):
                await request_role_change(
                    *(record.endpoint, record.instance, role),
                    drain_s=0.5,
                    token=self._env["BATON_TOKEN"],
                    security=EndpointSecurity(tls),
                )
        await self.whole()

    @property
    def urls(self) -> list[str]:
        return [f"https://{self.host}:{port}" for port in self._ports]

    def _router(self, i: int) -> subprocess.Popen[bytes]:
        options = [*self._router_options[i]]
        if i == STRICT:
            options += ["--ttft-slo-ms", "1", "--tpot-slo-ms", "1", "--max-requests", "1"]
        return self._baton("router", "--port", str(self._ports[i]), *options)

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
    days, certificates.NODE_DAYS = certificates.NODE_DAYS, 1
    try:
        certificates.create_ca(folder, [NAME, host])
    finally:
        certificates.NODE_DAYS = days
    files = {"ca": "ca.pem", "cert": f"{NAME}.pem", "key": f"{NAME}.key"}
    return {name: str(folder / file) for name, file in files.items()}


def _flags(prefix: str, files: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for name, path in files.items() for word in (f"--{prefix}-{name}", path))


@contextlib.asynccontextmanager
async def load(
    session: aiohttp.ClientSession, url: str, clients: int, prompt: int, tokens: int
) -> AsyncIterator[None]:
    """Clients that ask again and again, for texts that begin alike; whatever they get."""
    tasks = [asyncio.create_task(_client(session, url, i, prompt, tokens)) for i in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _client(
    session: aiohttp.ClientSession, url: str, number: int, prompt: int, tokens: int
) -> None:
    draw = random.Random(number)
    while True:
        text = [7] * 64 + [draw.randrange(3, 4096) for _ in range(prompt - 64)]
        body: dict[str, Any] = {"model": "baton-demo", "prompt": text, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    await asyncio.sleep(0.2)
                await reply.read()
