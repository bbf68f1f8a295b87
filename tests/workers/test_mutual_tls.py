"""Hand-overs and fetches through mutual TLS, by the cluster's name; who is turned away; renewal
while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cluster.credentials import certificates
from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from kvtransfer.carriers.grpc_carrier import PULL_METHOD
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.errors import StartupError
from protocol.security import cluster_token
from protocol.security.tls import TlsFiles
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc
from tests.engine.conftest import request
from tests.workers.conftest import Oracle
from tests.workers.harness import TOKEN, attached, free_again, running, settings
from tests.workers.test_handover import prompt
from tests.workers.test_peer_fetch import first, source

NAME = "baton.cluster"
"""What the certificates are for: the workers listen at 127.0.0.1, which is in none."""


def node(folder: Path, name: str | None = NAME) -> TlsFiles:
    files = (str(folder / each) for each in ("ca.pem", f"{NAME}.pem", f"{NAME}.key"))
    ca, cert, key = files
    return TlsFiles(ca=ca, cert=cert, key=key, name=name)


@pytest_asyncio.fixture(scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    certificates.create_ca(made, [NAME])
    return made


@pytest_asyncio.fixture(scope="module")
async def pair(
    folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Worker, Worker]]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    tls = node(folder)
    wanted = (settings(role, server, model, tls=tls) for role in ("prefill", "decode"))
    async with running(*wanted) as (p, d):
        yield p, d
    server.stop()


async def test_kv_is_handed_over_and_fetched(
    pair: tuple[Worker, Worker], folder: Path, oracle: Oracle
) -> None:
    p, d = pair
    async with attached(d, p, security=EndpointSecurity(node(folder))) as client:
        asked = first(1)
        answer = await client.ask(asked)
        assert answer.tokens == oracle(asked)
        assert answer.measured is not None and answer.measured.kv_bytes > 100_000
        # The next turn is prefilled by P, which fetches the answer's blocks from D first.
        turn = request("2", [*asked.prompt, *answer.tokens, *prompt(90, 2)], max_tokens=4)
        client.candidates[0].fetch.CopyFrom(source(d))
        assert (await client.ask(turn)).tokens == oracle(turn)
        assert "fetch_done" in client.answers["2"].timeline
    await asyncio.gather(free_again(p), free_again(d))


async def test_who_is_turned_away(
    pair: tuple[Worker, Worker], folder: Path, tmp_path: Path
) -> None:
    p, _ = pair
    certificates.create_ca(tmp_path / "other", [NAME])
    mine, other = EndpointSecurity(node(folder)), EndpointSecurity(node(tmp_path / "other"))
    anonymous = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    endpoint, kv_endpoint = p.record().endpoint, p.record().kv_endpoint
    refused = {
        "plain": LOOPBACK_ONLY.channel,
        "of another CA": other.channel,
        "who asks for its address": EndpointSecurity(node(folder, name=None)).channel,
        "without a certificate": lambda e: grpc.secure_channel(e, anonymous),
    }
    for who, dial in refused.items():
        for code in (_run(dial(endpoint), TOKEN), _pull(dial(kv_endpoint), TOKEN)):
            assert await code is grpc.StatusCode.UNAVAILABLE, who
    for token in ("", "wrong"):
        for code in (_run(mine.channel(endpoint), token), _pull(mine.channel(kv_endpoint), token)):
            assert await code is grpc.StatusCode.UNAUTHENTICATED
    # With both, the call arrives: it is the transfer that nobody knows.
    assert await _pull(mine.channel(kv_endpoint), TOKEN) is grpc.StatusCode.NOT_FOUND


async def test_renewal_needs_no_restart(
    pair: tuple[Worker, Worker], folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All get certificates of a new CA, which nobody has met before."""
    monkeypatch.setattr("protocol.security.tls.CHECK_FILES_S", 0.0)
    p, d = pair
    old = EndpointSecurity(node(folder))
    certificates.create_ca(folder / "new", [NAME])
    for name in ("ca.pem", f"{NAME}.pem", f"{NAME}.key"):
        (folder / "new" / name).replace(folder / name)
    assert old.version == 1
    async with attached(d, p, security=EndpointSecurity(node(folder))) as client:
        asked = request("new", prompt(150, 7), max_tokens=20)
        answer = await client.ask(asked)
    assert answer.tokens == oracle(asked)
    assert answer.measured is not None, "it came from the prefill worker"


def test_workers_name_what_is_wrong(
    folder: Path, redis: EmbeddedRedis, model: Path, tmp_path: Path
) -> None:
    certificates.create_ca(tmp_path, ["10.9.8.7"])
    paths = [str(tmp_path / name) for name in ("ca.pem", "10.9.8.7.pem", "10.9.8.7.key")]
    tls = TlsFiles(ca=paths[0], cert=paths[1], key=paths[2])
    with pytest.raises(StartupError, match="need TLS"):
        Worker(settings("decode", redis, model, host="10.9.8.7"))
    with pytest.raises(StartupError, match=r"10\.9\.8\.7, and not for '127\.0\.0\.1'"):
        Worker(settings("decode", redis, model, tls=tls))
    with pytest.raises(StartupError, match="BATON_TOKEN"):
        Worker(settings("decode", redis, model, tls=tls, host="10.9.8.7", token=""))


async def _run(channel: grpc.Channel, token: str) -> grpc.StatusCode:
    """How a call of Prefill.Run ends."""

    def call() -> grpc.StatusCode:
        with channel:
            events = rpc.PrefillStub(channel).Run(
                iter([pb.PrefillCall()]), metadata=cluster_token.token_metadata(token), timeout=10
            )
            return _end(events)

    return await asyncio.to_thread(call)


async def _pull(channel: grpc.Channel, token: str) -> grpc.StatusCode:
    def call() -> grpc.StatusCode:
        with channel:
            method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PULL_METHOD)
            return _end(method(b"x" * 16, metadata=cluster_token.token_metadata(token), timeout=10))

    return await asyncio.to_thread(call)


def _end(events: object) -> grpc.StatusCode:
    try:
        list(events)  # type: ignore[call-overload]
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
