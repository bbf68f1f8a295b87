"""One cluster of three machines for a module, and those who use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bench.lib.oracle import Oracle, requests
from protocol.requests import Request
from tests.e2e.hosts import Network
from tests.e2e.hosts.clients import Clients
from tests.e2e.hosts.cluster import YAML, HostCluster
from tests.e2e.hosts.watch import Watch
from tests.system import needs


@pytest.fixture(scope="module")
def cluster() -> Iterator[HostCluster]:
    needs("sshd", "ssh", "ip", "tc", "nft", "rsync", "unshare", "nsenter", root=True)
    with Network() as net:
        cluster = HostCluster(net)
        cluster.prepare()
        cluster.ray(f"up -y {YAML}")
        cluster.up()
        yield cluster


@pytest.fixture(scope="module")
async def clients(cluster: HostCluster) -> AsyncIterator[Clients]:
    clients = Clients(cluster)
    yield clients
    await clients.close()


@pytest.fixture(scope="module")
def watch(cluster: HostCluster, clients: Clients) -> Watch:
    return Watch(cluster, clients)


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(seed=5, count=9, tokens=48)


@pytest.fixture(scope="module")
def texts(asked: list[Request]) -> list[list[int]]:
    return Oracle()(asked)
