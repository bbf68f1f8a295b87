"""Whatever is in Redis, and however full it is: records are missed at most, and leases go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import redis
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import OutOfMemoryError, RedisError

from cluster.local.redis_server import EmbeddedRedis
from protocol.registry import leases
from protocol.registry.directory import AutoscalerRecord, Directory, ModelInfo, WorkerRecord
from protocol.registry.redis_client import connect
from protocol.registry.untrusted import MAX_RECORD_BYTES, decode_untrusted

MODEL = ModelInfo(
    id="m", fingerprint="f", precision="exact", max_model_len=1, vocab_size=1, kv_bytes_per_token=1
)
GOOD = WorkerRecord(
    instance="a" * 32,
    role="decode",
    endpoint="127.0.0.1:1",
    kv_endpoint="127.0.0.1:2",
    model=MODEL,
    pid=1,
    engine_pid=2,
)
NESTED = b"\x81\xa1x" + b"\x91" * 1500 + b"\xc0"
MEMBERS, PREFIX = "baton:test:workers", "baton:test:worker:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    embedded = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    embedded.start()
    with redis.Redis.from_url(embedded.url) as server:
        yield server
    embedded.stop()


@pytest.fixture
async def client(server: redis.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    server.config_set("maxmemory", "0")
    server.flushall()
    client = connect(f"unix://{server.connection_pool.connection_kwargs['path']}")
    yield client
    await client.aclose()


def mutated() -> st.SearchStrategy[bytes]:
    """Bytes near a valid record, and any others."""
    blob = msgspec.msgpack.encode(GOOD)

    def splice(place: int, cut: int, more: bytes) -> bytes:
        return blob[:place] + more + blob[place + cut :]

    near = st.builds(splice, st.integers(0, len(blob)), st.integers(0, 8), st.binary(max_size=12))
    deep = st.integers(1, 4000).map(lambda n: b"\x81\xa1x" + b"\x91" * n + b"\xc0")
    return st.one_of(st.binary(max_size=200), near, deep)


@given(mutated())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_valid_record_or_none(data: bytes) -> None:
    directory = Directory(redis.asyncio.Redis(), "test")
    for kind in (directory.workers, directory.routers, directory.autoscalers):
        record = decode_untrusted(kind._decoder, data)
        assert record is None or isinstance(kind._is_valid(record), bool)  # type: ignore[arg-type]


def test_a_reply_that_is_no_short_string_is_none() -> None:
    decoder = msgspec.msgpack.Decoder(str)
    for reply in (None, 7, [b"\xa1x"], RedisError("x"), b"", msgspec.msgpack.encode("x" * 20_000)):
        assert decode_untrusted(decoder, reply) is None
    assert decode_untrusted(decoder, b"\xa1x") == "x"


async def test_poisoned_records_and_odd_keys_hide_no_worker(
    client: redis.asyncio.Redis, server: redis.Redis
) -> None:
    directory = Directory(client, "test")
    await directory.workers.renew(GOOD)
    server.set(PREFIX + "nested", NESTED)
    server.set(PREFIX + "large", b"\xc4" * (MAX_RECORD_BYTES + 100))
    server.lpush(PREFIX + "list", "x")
    server.set(PREFIX + "other", msgspec.msgpack.encode(GOOD))  # of another instance
    server.set(PREFIX.encode() + b"\xff\x00", b"\x80")
    server.sadd(MEMBERS, "nested", "large", "list", "other", b"\xff\x00", "", "without a record")
    assert await directory.workers.all() == [GOOD]
    assert server.smembers(MEMBERS) >= {b"a" * 32, b"nested"}  # may be of another version
    assert b"without a record" not in server.smembers(MEMBERS)


@pytest.mark.parametrize(
    "poison",
    [
        lambda server: server.set(MEMBERS, NESTED),
        lambda server: server.lpush(MEMBERS, "x"),
        lambda server: server.sadd(MEMBERS, *(b"%d" % i for i in range(leases.MAX_MEMBERS + 1))),
        lambda server: server.sadd(MEMBERS, b"x" * (leases.MAX_SET_BYTES + 1)),
    ],
    ids=["string", "list", "many", "large"],
)
async def test_an_unusable_set_of_ids_is_built_anew(
    client: redis.asyncio.Redis, server: redis.Redis, poison: object
) -> None:
    workers = Directory(client, "test").workers
    await workers.renew(GOOD)
    server.delete(MEMBERS)
    poison(server)  # type: ignore[operator]
    with pytest.raises(RedisError, match="it is rebuilt"):  # by which readers keep their last view
        await workers.all()
    await workers.renew(GOOD)
    assert await workers.all() == [GOOD]


async def test_many_unreadable_records_are_not_read_again(
    client: redis.asyncio.Redis, server: redis.Redis
) -> None:
    workers = Directory(client, "test").workers
    await workers.renew(GOOD)
    names = [f"poison{i}" for i in range(leases.MAX_UNREADABLE + 1)]
    server.mset({PREFIX + name: NESTED for name in names})
    server.sadd(MEMBERS, *names)
    assert await workers.all() == [GOOD]
    assert server.smembers(MEMBERS) == {b"a" * 32}


async def test_a_lease_goes_on_in_a_full_redis(
    client: redis.asyncio.Redis, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes are refused at maxmemory, but a lease that exists can be extended."""
    monkeypatch.setattr(leases, "LEASE_S", 0.3)
    workers = Directory(client, "test").workers
    assert await workers.renew(GOOD)
    server.config_set("maxmemory", "1")
    for _ in range(4):
        assert not await workers.renew(msgspec.structs.replace(GOOD, running=5))
        await asyncio.sleep(0.12)
    assert await workers.all() == [GOOD]  # longer than LEASE_S later, as it was last written
    with pytest.raises(OutOfMemoryError):
        await workers.renew(msgspec.structs.replace(GOOD, instance="b" * 32))
    server.config_set("maxmemory", "0")
    assert await workers.renew(msgspec.structs.replace(GOOD, running=5))
    assert [record.running for record in await workers.all()] == [5]


async def test_a_full_redis_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class FullRedis:
        written = False

        async def renew(self, record: AutoscalerRecord) -> bool:
            return self.written

        async def remove(self, instance: str) -> None: ...

    full = FullRedis()
    record = AutoscalerRecord(instance="a", model="m", metrics_endpoint="", pid=1)
    renewer = leases.LeaseRenewer(full, lambda: record)  # type: ignore[arg-type]
    await renewer.start()
    for written in (False, False, True, True):
        full.written = written
        renewer.renew_now()
        await asyncio.sleep(0.01)
    await renewer.end()
    lost, back = caplog.messages
    assert "Redis is full" in lost and "again" in back
