"""fp8 between two workers: pools and codecs differ, the text does not; bytes are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.local.redis_server import EmbeddedRedis
from engine.kv_cache.kv_format import Codec
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.traffic import CarrierTraffic
from protocol.errors import StartupError
from protocol.wire import wire_pb2 as pb
from tests.workers.harness import attached, running, settings
from tests.workers.test_handover import mixed

BLOCKS = sum(-(-(150 + 13 * i) // 32) for i in range(6))  # of the prompts below
FP8 = {"kv_precision": "fp8"}


async def texts(
    redis: EmbeddedRedis, model: Path, pools: tuple[str, str], codec: str
) -> tuple[list[list[int]], dict[Codec, CarrierTraffic]]:
    """Six prompts one after another, so that every run has the same batches."""
    p_settings = settings("prefill", redis, model, **FP8, kv_storage=pools[0])
    d_settings = settings("decode", redis, model, **FP8, kv_storage=pools[1], kv_codec=codec)
    async with running(p_settings, d_settings) as (p, d), attached(d, p) as client:
        answers = [await client.ask(r) for r in mixed(6)]
        assert all(a.finish == pb.FINISH_LENGTH and "kv_ready" in a.timeline for a in answers)
        by_carrier = d._receiver.traffic.by_carrier
        assert {carrier for carrier, _ in by_carrier} == {"local"}
        return [a.tokens for a in answers], {codec: t for (_, codec), t in by_carrier.items()}


async def test_pools_and_codecs_change_bytes_but_no_token(
    redis: EmbeddedRedis, model: Path
) -> None:
    expected, raw = await texts(redis, model, ("wide", "wide"), "raw")
    assert list(raw) == [Codec.RAW] and raw[Codec.RAW].bytes == raw[Codec.RAW].raw_bytes
    for pools, codec in ((("wide", "fp8"), "auto"), (("fp8", "wide"), "fp8")):
        got, traffic = await texts(redis, model, pools, codec)
        assert got == expected
        assert list(traffic) == [Codec.FP8]
        packed = traffic[Codec.FP8]
        # 3 layers, K and V of 2 heads of 16 elements: a byte each, and one for the scale.
        assert packed.bytes == packed.frames * HEADER_BYTES + BLOCKS * 32 * 3 * 2 * 2 * (16 + 1)
        assert packed.raw_bytes == packed.frames * HEADER_BYTES + BLOCKS * 32 * 3 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("change", [{"kv_storage": "fp8"}, {"kv_codec": "fp8"}])
async def test_settings_that_would_round_exact_kv_are_refused(
    redis: EmbeddedRedis, model: Path, change: dict[str, str]
) -> None:
    with pytest.raises(StartupError, match="would round"):
        async with running(settings("decode", redis, model, **change)) as [worker]:
            worker._receiver.context().carrier_offers("another", "127.0.0.1:1")
