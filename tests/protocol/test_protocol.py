"""Keys, requests from the wire, and what Redis may contain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import RedisError

from cluster.local.redis_server import EmbeddedRedis
from protocol.block_keys import BLOCK_TOKENS, block_keys, cache_root
from protocol.errors import InvalidRequest, StartupError
from protocol.registry.directory import (
    Directory,
    ModelInfo,
    WorkerRecord,
    new_instance_id,
)
from protocol.registry.redis_client import connect
from protocol.requests import MAX_DEADLINE_S, Request, request_from_wire, request_to_wire
from protocol.sampling_params import SamplingParams
from protocol.security.listen_hosts import check_worker_host
from protocol.wire import wire_pb2 as pb

ROOT = cache_root(b"secret", "tenant", "model", "exact")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4 * BLOCK_TOKENS)


@given(TOKENS)
def test_keys_chain(tokens: list[int]) -> None:
    keys = block_keys(ROOT, tokens)
    assert len(keys) == len(tokens) // BLOCK_TOKENS
    parent = ROOT
    for i, key in enumerate(keys):
        [parent] = block_keys(parent, tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
        assert key == parent


def test_keys_depend_on_everything_before_and_on_the_namespace() -> None:
    tokens = list(range(96))
    keys = block_keys(ROOT, tokens)
    changed = block_keys(ROOT, [7, *tokens[1:]])
    assert not set(keys) & set(changed)
    parts = ("secret", "tenant", "model", "exact")
    for i in range(4):
        other = [part + "x" if i == j else part for j, part in enumerate(parts)]
        root = cache_root(other[0].encode(), *other[1:])
        assert not set(keys) & set(block_keys(root, tokens))
    # Where one part ends matters, too.
    assert cache_root(b"s", "ab", "c", "d") != cache_root(b"s", "a", "bc", "d")


def request(**changes: object) -> Request:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, seed=2**62, max_tokens=9, stop_token_ids=(3,)
    )
    fields: dict[str, object] = {"id": "a", "prompt": (1, 2, 3), "emitted": (4,)}
    fields |= {"sampling": sampling, "cache_root": ROOT}
    return Request(**(fields | changes))  # type: ignore[arg-type]


def test_a_request_survives_the_wire() -> None:
    assert (
        request_from_wire(pb.Request.FromString(request_to_wire(request()).SerializeToString()))
        == request()
    )


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"prompt": ()}, "prompt"),
        ({"cache_root": b"short"}, "cache_root"),
        ({"emitted": tuple(range(9))}, "max_tokens"),
    ],
)
def test_out_of_range_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_from_wire(request_to_wire(request(**changes)))
    assert caught.value.param == param


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_may_be_bound(host: str) -> None:
    check_worker_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_nothing_else_may_be_bound(host: str) -> None:
    with pytest.raises(StartupError):
        check_worker_host(host)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


def record(instance: str) -> WorkerRecord:
    model = ModelInfo(
        id="m",
        fingerprint="f",
        precision="exact",
        max_model_len=10,
        vocab_size=10,
        kv_bytes_per_token=1,
    )
    return WorkerRecord(
        instance=instance,
        role="decode",
        endpoint="127.0.0.1:1",
        kv_endpoint="127.0.0.1:2",
        model=model,
        pid=1,
        engine_pid=2,
    )


async def test_directory_passes_over_garbage_and_sweeps_the_dead(redis: EmbeddedRedis) -> None:
    client = connect(redis.url)
    directory = Directory(client, "c")
    good, forged, garbage, dead = (new_instance_id() for _ in range(4))
    await directory.workers.renew(record(good))
    await client.sadd("baton:c:workers", forged, garbage, dead, b"\xff\xfe")
    blob = await client.get(f"baton:c:worker:{good}")
    await client.set(f"baton:c:worker:{forged}", blob)  # says that it is another
    await client.set(f"baton:c:worker:{garbage}", b"\xc1garbage")
    assert await directory.workers.all() == [record(good)]
    members = await client.smembers("baton:c:workers")
    assert dead.encode() not in members and good.encode() in members
    assert b"\xff\xfe" not in members
    await directory.workers.remove(good)
    assert await directory.workers.all() == []
    await client.aclose()


async def test_a_directory_that_holds_something_else_is_written_anew(redis: EmbeddedRedis) -> None:
    async with connect(redis.url) as client:
        directory = Directory(client, "d")
        one, other = (record(new_instance_id()) for _ in range(2))
        await directory.workers.renew(one)
        await client.set("baton:d:workers", "not a set")
        with pytest.raises(RedisError):
            await directory.workers.all()
        for again in (one, other):
            await directory.workers.renew(again)
        assert sorted(await directory.workers.all(), key=lambda r: r.instance) == sorted(
            (one, other), key=lambda r: r.instance
        )


@given(
    first_token_s=st.floats(0, MAX_DEADLINE_S),
    token_timeout_s=st.floats(0, MAX_DEADLINE_S),
    since_s=st.floats(0, 2 * MAX_DEADLINE_S),
)
def test_deadlines_travel_and_run_out(
    first_token_s: float, token_timeout_s: float, since_s: float
) -> None:
    sent = request(first_token_s=first_token_s, token_timeout_s=token_timeout_s)
    came = request_from_wire(pb.Request.FromString(request_to_wire(sent).SerializeToString()))
    assert came == sent
    later = came.after(since_s)
    assert bool(later.first_token_s) == bool(first_token_s), "one that has passed is not none"
    assert later.first_token_s <= max(first_token_s, 0.001)
    assert later.first_token_limit_s > 0 and later.token_timeout_s == token_timeout_s
    assert came.resumed((1, 2)).first_token_s == token_timeout_s and came.resumed((4,)) == came


@pytest.mark.parametrize("name", ["first_token_s", "token_timeout_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 2 * MAX_DEADLINE_S])
def test_a_deadline_that_no_router_sends_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        request_from_wire(request_to_wire(request(**{name: seconds})))
