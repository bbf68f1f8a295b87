"""What a cluster tells of itself: who is where, and workers' counters."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter

from protocol.requests import Request
from tests.e2e.hosts.clients import Clients
from tests.e2e.hosts.cluster import HostCluster
from tests.e2e.hosts.host import Host

_NAME = "baton.cluster"
_POLL_S = 0.3


class Watch:
    """By the pages of a router, and of workers, which want a certificate of the cluster."""

    def __init__(self, cluster: HostCluster, clients: Clients) -> None:
        self._cluster, self._session = cluster, clients.session
        self._member = ssl.create_default_context(cafile=str(cluster.folder / "ca.pem"))
        node = cluster.folder / "node"
        self._member.load_cert_chain(node / "node.pem", node / "node.key")
        key = (node / "monitoring.key").read_text()  # the clients' key may not look at /sd
        self._headers = {"authorization": f"Bearer {key}"}

    async def targets(self, router: Host) -> list[tuple[str, str]]:
        """(role, host:port of its metrics) of all live processes, as a router knows them."""
        url = f"{self._cluster.url(router)}/sd"
        async with self._session.get(url, headers=self._headers) as reply:
            assert reply.status == 200, await reply.text()
            groups = await reply.json()
        return [(g["labels"]["__meta_baton_role"], t) for g in groups for t in g["targets"]]

    async def placed(self, router: Host) -> Counter[tuple[str, str]]:
        """How many of each role are on each host, by name."""
        names = {host.address: host.name for host in self._cluster.hosts}
        found = [(r, names[t.rpartition(":")[0]]) for r, t in await self.targets(router)]
        return Counter(found)

    async def until(
        self, router: Host, wanted: dict[tuple[str, str], int], within_s: float
    ) -> Counter[tuple[str, str]]:
        """Waits until so many are there of each that is named; returns who is there."""
        there: Counter[tuple[str, str]] = Counter()
        try:
            async with asyncio.timeout(within_s):
                while any(there[key] != count for key, count in wanted.items()):
                    await asyncio.sleep(_POLL_S)
                    there = await self.placed(router)
        except TimeoutError:
            raise TimeoutError(f"wanted {wanted} in {within_s} s; there are {there}") from None
        return there

    async def sum(self, router: Host, role: str, name: str, labels: str = "") -> float:
        """Of a counter of all workers of a role; ``labels`` are some of its labels, as text."""
        pages = [await self._page(t) for r, t in await self.targets(router) if r == role]
        row = re.compile(rf"^{name}(?:{{.*{labels}.*}})? (\S+)$", re.MULTILINE)
        return sum(float(value) for page in pages for value in row.findall(page))

    async def kv_bytes(self, router: Host, carrier: str) -> float:
        """KV that decode workers have received by a carrier, in bytes."""
        labels = f'transport="{carrier}"'
        return await self.sum(router, "decode", "baton_kv_transfer_bytes_total", labels)

    async def prefill_is_used(
        self, router: Host, clients: Clients, request: Request, within_s: float = 20.0
    ) -> None:
        """Until KV of a request has come to a decode worker."""
        name = "baton_kv_transfer_bytes_total"
        before = await self.sum(router, "decode", name)
        async with asyncio.timeout(within_s):
            while await self.sum(router, "decode", name) <= before:
                assert not (await clients.ask(router, request)).error

    async def _page(self, target: str) -> str:
        url = f"https://{target}/metrics"
        async with self._session.get(url, ssl=self._member, server_hostname=_NAME) as reply:
            assert reply.status == 200, url
            return await reply.text()
