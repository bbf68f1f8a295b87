"""A cluster of three machines by the real `ray up`, from a fourth: placed, encrypted, hurt, ended.

One cluster, and one story: each test finds what the one before has left. No stream is ever lost or
altered, but one whose own router died.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from bench.lib.oracle import Oracle, requests, wrong
from protocol.requests import Request
from tests.e2e.asking import prompt
from tests.e2e.hosts.clients import CALM_S, Clients, Load
from tests.e2e.hosts.cluster import CONFIG, PYTHON, YAML, HostCluster
from tests.e2e.hosts.watch import Watch

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(300)]

NOBODY_WAITS_S = 20.0
FIREWALL_S = 5.0
_DECODE_WORKERS = 3
LONG = 2500  # tokens of a prompt whose KV takes a second and more at 100 Mbit/s
_KV_BYTES = 6 * 2 * 2 * 64 * 4  # of a token of the demo model: layers, K and V, heads, size, fp32
_MBIT_100 = 100e6 / 8


async def test_replicas_are_where_the_file_puts_them(cluster: HostCluster, watch: Watch) -> None:
    assert await watch.placed(cluster.c) == {
        ("prefill", "b"): 1,
        ("decode", "c"): 2,
        **{("router", host.name): 1 for host in cluster.hosts},
    }


async def test_every_router_streams_the_text_of_one_engine(
    cluster: HostCluster, clients: Clients, asked: list[Request], texts: list[list[int]]
) -> None:
    assert not wrong(await clients.ask_all(cluster.hosts, asked), texts)


async def test_kv_crosses_the_wire(
    cluster: HostCluster, clients: Clients, watch: Watch, asked: list[Request]
) -> None:
    name = "baton_kv_transfer_bytes_total"
    before = await watch.sum(cluster.a, "decode", name), cluster.net.received(cluster.c)
    await clients.ask_all([cluster.a], asked)
    after = await watch.sum(cluster.a, "decode", name), cluster.net.received(cluster.c)
    # A busy router may let a decode worker prefill some of these short prompts.
    handed_over = sum(len(request.prompt) - 1 for request in asked) * _KV_BYTES // 2
    assert after[0] - before[0] >= handed_over
    assert after[1] - before[1] >= after[0] - before[0]  # and none of it within the host


async def test_others_are_refused(cluster: HostCluster, clients: Clients, watch: Watch) -> None:
    url = f"{cluster.url(cluster.b)}/v1/models"
    for headers in ({"authorization": ""}, {"authorization": "Bearer sk-other"}):
        async with clients.session.get(url, headers=headers) as reply:
            assert reply.status == 401
    with pytest.raises(aiohttp.ClientError):
        await clients.session.get(url.replace("https", "http"))
    for endpoint, codes in (await asyncio.to_thread(cluster.knock)).items():
        assert codes.pop("a worker") not in ("UNAVAILABLE", "UNAUTHENTICATED"), endpoint
        assert codes == {
            "no TLS": "UNAVAILABLE",
            "no certificate": "UNAVAILABLE",
            "no token": "UNAUTHENTICATED",
            "another token": "UNAUTHENTICATED",
        }, endpoint
    cluster.o.run(f"! timeout 1 bash -c '< /dev/tcp/{cluster.a.address}/8265'")  # Ray's dashboard
    status = f"{PYTHON} -m ray.scripts.scripts status --address {cluster.a.address}:6379"
    token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN={'0' * 64}"
    with pytest.raises(RuntimeError, match=r"(?i)token"):
        cluster.o.run(f"{token} {status}")


async def test_a_rolling_update_loses_no_stream(
    cluster: HostCluster, clients: Clients, asked: list[Request], texts: list[list[int]]
) -> None:
    before = [cluster.serving(host) for host in cluster.hosts]
    router = {**CONFIG["router"], "ttft_slo_ms": 3000}
    pools = {"prefill": {"workers": 1, "prefill_chunk": 64}}
    pools["decode"] = {**CONFIG["pools"]["decode"], "prefill_chunk": 5}
    cluster.configure({**CONFIG, "router": router, "pools": pools})
    async with Load(clients, cluster.hosts, asked, pause_s=CALM_S) as load:
        await asyncio.to_thread(cluster.up)
    assert not load.wrong(texts)
    assert load.longest_s() < NOBODY_WAITS_S
    for host, old in zip(cluster.hosts, before, strict=True):
        assert old and not old & cluster.serving(host)


async def test_more_workers(
    cluster: HostCluster,
    clients: Clients,
    watch: Watch,
    asked: list[Request],
    texts: list[list[int]],
) -> None:
    async with Load(clients, cluster.hosts, asked, pause_s=CALM_S) as load:
        await asyncio.to_thread(cluster.baton, "scale decode=3 --address auto")
        await watch.until(cluster.a, {("decode", "c"): 3}, 10)
    assert not load.wrong(texts)


async def test_kv_takes_tcp_between_hosts(cluster: HostCluster, watch: Watch) -> None:
    """Prefill is on b and decode on c. Within one host KV takes ``local``: tests/workers."""
    carried = {name: await watch.kv_bytes(cluster.a, name) for name in ("local", "tcp", "grpc")}
    assert carried["tcp"] > 0 and not carried["local"] and not carried["grpc"], carried


async def test_a_firewall_that_drops_the_kv_port_alone(
    cluster: HostCluster,
    clients: Clients,
    watch: Watch,
    asked: list[Request],
    texts: list[list[int]],
) -> None:
    """On each decode worker one request finds it out, and waits for 5 s at most; the KV of all
    others takes another carrier at once."""
    (prefill,) = (w for w in cluster.workers() if w.role == "prefill")
    ports = cluster.net.listening_ports(cluster.b, prefill.pid) - {prefill.port}
    dialled = ports & cluster.net.dialled_ports(cluster.c, cluster.b)
    assert len(dialled) == 1, (ports, dialled)  # that of the carrier tcp
    before = await watch.kv_bytes(cluster.a, "grpc")
    cluster.net.drop_ports(cluster.b, dialled)
    seen = [await clients.ask(cluster.a, request) for request in asked]
    cluster.net.drop_ports(cluster.b, ())
    assert not wrong(seen, texts)
    waits_s = sorted(record.longest_wait_s for record in seen)
    assert waits_s[-1] < FIREWALL_S and waits_s[-1 - _DECODE_WORKERS] < FIREWALL_S / 3, waits_s
    assert await watch.kv_bytes(cluster.a, "grpc") > before


async def test_a_slow_link(cluster: HostCluster, clients: Clients, watch: Watch) -> None:
    """100 Mbit/s to the prefill host: KV takes its time, the first token does not wait for it.

    A transfer lasts from the pull on: as long as the prompt is computed, at least. On a machine
    that computes slowly the link is slower accordingly, so that the wire takes twice that long."""
    asked = [_long(seed) for seed in (1, 2)]
    text = Oracle()(asked)
    name = "baton_kv_transfer_seconds_sum"
    await watch.prefill_is_used(cluster.a, clients, _long(3))  # again, after the test before
    spent = [await watch.sum(cluster.a, "decode", name)]
    quick = await clients.ask(cluster.a, asked[0])
    spent.append(await watch.sum(cluster.a, "decode", name))
    before_s = spent[1] - spent[0]
    rate = min(_MBIT_100, LONG * _KV_BYTES / (2 * before_s))  # bytes per second
    cluster.net.shape(cluster.b, f"{8 * rate:.0f}bit")
    try:
        slow = await clients.ask(cluster.a, asked[1])
    finally:
        cluster.net.shape(cluster.b, None)
    spent.append(await watch.sum(cluster.a, "decode", name))
    assert not wrong([quick, slow], text)
    wire_s, after_s = LONG * _KV_BYTES / rate, spent[2] - spent[1]
    # The wire takes twice as long as the transfer before: a link that is not slow would not do.
    assert 0.9 * wire_s < after_s < NOBODY_WAITS_S


def _long(seed: int) -> Request:
    (short,) = requests(seed, count=1, tokens=16)
    return msgspec.structs.replace(short, prompt=tuple(prompt(seed, LONG)))


async def test_a_cut_link(
    cluster: HostCluster,
    clients: Clients,
    watch: Watch,
    asked: list[Request],
    texts: list[list[int]],
) -> None:
    """The prefill host is unplugged under load, with KV on the way: prompts are computed elsewhere.
    Then it is back."""
    name = "baton_kv_transfer_failures_total"
    broken = await watch.sum(cluster.a, "decode", name)
    cluster.net.shape(cluster.b, "40mbit")
    async with Load(clients, [cluster.a, cluster.c], asked) as load:
        long = asyncio.create_task(clients.ask(cluster.a, _long(3)))
        await cluster.net.arriving(cluster.c, LONG * _KV_BYTES // 4)
        cluster.net.cut(cluster.b)
        await load.more(10)
        assert not wrong([await long], Oracle()([_long(3)]))
        assert await watch.sum(cluster.a, "decode", name) > broken
        cluster.net.shape(cluster.b, None)
        cluster.net.heal(cluster.b)
    assert not load.wrong(texts)
    assert max(load.longest_s(), (await long).longest_wait_s) < NOBODY_WAITS_S
    await watch.until(cluster.a, {("prefill", "b"): 1}, 20)
    await watch.prefill_is_used(cluster.a, clients, asked[0])


async def test_a_worker_host_dies(
    cluster: HostCluster, clients: Clients, asked: list[Request], texts: list[list[int]]
) -> None:
    """All of it at once: prefill, a router, Ray's agents, and the link."""
    async with Load(clients, [cluster.a, cluster.c], asked) as load:
        await load.running()
        cluster.net.kill(cluster.b)
        await load.more(10)
    assert not load.wrong(texts)
    assert load.longest_s() < NOBODY_WAITS_S


async def test_the_head_dies(
    cluster: HostCluster, clients: Clients, asked: list[Request], texts: list[list[int]]
) -> None:
    """Streams by way of another router go on, and new ones begin, with Ray's head away."""
    async with Load(clients, [cluster.c], asked) as load:
        await load.running()
        cluster.net.kill(cluster.a)
        await load.more(20)
    assert not load.wrong(texts)
    assert load.longest_s() < NOBODY_WAITS_S


async def test_the_head_comes_back(
    cluster: HostCluster,
    clients: Clients,
    watch: Watch,
    asked: list[Request],
    texts: list[list[int]],
) -> None:
    """By `ray up`, as do hosts that died; who lived is left alone; then all of it works again."""
    lived = cluster.serving(cluster.c)
    cluster.net.restart(cluster.a)
    cluster.net.restart(cluster.b)
    async with Load(clients, [cluster.c], asked, at_once=1, pause_s=CALM_S) as load:
        await asyncio.to_thread(cluster.ray, f"up -y {YAML}")
        wanted = {("router", "a"): 1, ("prefill", "b"): 1, ("router", "b"): 1}
        await watch.until(cluster.c, wanted, 120)
    assert not load.wrong(texts)
    assert lived and cluster.serving(cluster.c) == lived
    await asyncio.to_thread(cluster.baton, "scale decode=2 --address auto")
    await watch.until(cluster.c, {("decode", "c"): 2}, 20)
    await watch.prefill_is_used(cluster.a, clients, asked[0])
    assert not wrong(await clients.ask_all(cluster.hosts, asked), texts)


def test_ray_down_leaves_nothing(cluster: HostCluster) -> None:
    cluster.down()
    for host in cluster.hosts:
        assert host.processes() == {}
        assert host.run("ls /dev/shm") == ""
