"""Which wall binds a pool, what would relax it, and how it is shown: by tables."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from protocol.registry.directory import (
    WALLS,
    ModelInfo,
    WorkerRecord,
    WorkerUtilisation,
    _is_valid_worker,
)
from router.overview.pool_view import wall_views
from router.overview.prometheus_text import parse_page
from router.walls.binding import WallGauges, combine_workers, find_binding_wall, pool_walls
from router.walls.techniques import TRAPS, PoolProfile, rank_techniques
from tests.router.conftest import Start
from tests.router.fake_worker import outputs
from tests.router.wall_records import decoding, figures

H100 = {"flops": 989e12, "bandwidth": 3.35e12}
A100 = {"flops": 312e12, "bandwidth": 2.0e12}
KV_8B = 128 * 1024 * 1000  # of 1000 tokens


@pytest.mark.parametrize(
    ("now", "wall", "why"),
    [
        # 8 billion parameters at 2 TB/s: 125 tokens per second at most.
        (decoding(8e9, 1, 0, **A100, step_s=1 / 100), "bandwidth", ""),
        (decoding(8e9, 1, 0, **A100, step_s=1 / 30), None, "overhead"),
        (decoding(8e9, 64, KV_8B, **A100), "bandwidth", ""),
        # The ridge of an H100, at 295 FLOPs a byte.
        (decoding(70e9, 1, 0, **H100), "bandwidth", ""),
        (decoding(70e9, 280, 0, **H100), "bandwidth", ""),
        (decoding(70e9, 310, 0, **H100), "compute", ""),
        (figures(compute=0.6, bandwidth=0.1), "compute", ""),  # prefill
        (figures(compute=0.6, busy=0.4), None, "idle"),
        (figures(compute=0.24, bandwidth=0.2), None, "overhead"),
        (figures(bandwidth=0.7, starved=0.3, capacity=0.9), "capacity", ""),
        (figures(bandwidth=0.0, busy=0.0, starved=0.5, capacity=1.0), "capacity", ""),
        (figures(compute=0.9, starved=0.9), "compute", ""),
        (figures(compute=0.9, starved=0.9, busy=0.5), "capacity", ""),
        (figures(busy=0.1, kv_wait=2.0, network=0.9), "network", ""),
        (figures(busy=0.1, kv_wait=2.0, network=0.1), None, "idle"),  # waits for something else
        (figures(compute=0.5, network=0.9, kv_wait=0.1), "compute", ""),  # nobody waits
        (figures(starved=0.5, kv_wait=2.0, network=0.9), "capacity", ""),
    ],
)
def test_what_binds(now: WorkerUtilisation, wall: str | None, why: str) -> None:
    assert now.is_valid
    assert find_binding_wall(now) == (wall, why)


def gains(now: WorkerUtilisation, **about: Any) -> dict[str, float]:
    pool = PoolProfile(**{"role": "decode", "workers": 2, "figures": now, **about})
    found = rank_techniques(pool, find_binding_wall(now).wall)
    assert [t.gain for t in found] == sorted((t.gain for t in found), reverse=True)
    assert all(t.trap == TRAPS[t.name] for t in found)
    return {t.name: round(t.gain, 2) for t in found}


def test_70_billion_parameters_in_8_bits_take_half_the_time() -> None:
    """140 GB: 42 ms a token on an H100, 21 ms in 8 bits."""
    assert gains(decoding(70e9, 1, 0, **H100)) == {"fp8 weights": 2.0}


@pytest.mark.parametrize(
    ("now", "about", "expected"),
    [
        # At 71% of the bandwidth the other 29% of a step stay.
        (figures(bandwidth=0.71), {}, {"fp8 weights": 1.55}),
        (figures(bandwidth=0.71, element_bytes=4), {}, {"fp8 weights": 2.14}),
        (figures(bandwidth=0.71, element_bytes=1), {}, {}),
        # Compute is the next floor.
        (figures(bandwidth=1.0, compute=0.8), {}, {"fp8 weights": 1.25}),
        # What KV is read, fp8 weights do not spare.
        (figures(bandwidth=1.0, kv_share=0.5), {}, {"fp8 weights": 1.33}),
        (
            figures(bandwidth=1.0, kv_share=0.5, kv_shrink=2.0),
            {},
            {"fp8 weights": 1.33, "fp8 KV": 1.33},
        ),
        # (1 - 0.6^5) / 0.4 = 2.31 tokens for a pass and 4 drafts at a tenth of it.
        (
            figures(bandwidth=0.6, drafts=False, element_bytes=1),
            {},
            {"speculation": 1.65},
        ),
        (figures(bandwidth=0.6, drafts=False, element_bytes=1), {"role": "prefill"}, {}),
        # Beyond the ridge a verification is not free any more.
        (figures(bandwidth=0.9, compute=0.5, drafts=False, element_bytes=1), {}, {}),
        (
            figures(bandwidth=0.9, batch=62.0, kv_share=0.2, element_bytes=1),
            {"waiting": 5, "max_batch": 64},
            {"larger batch": 1.69},
        ),
        (
            figures(bandwidth=0.9, batch=30.0, element_bytes=1),
            {"waiting": 5, "max_batch": 64},
            {},
        ),
        (figures(compute=0.8), {}, {"fp8 activations": 1.67, "a worker on another GPU": 1.5}),
        (figures(compute=0.8, gpu=False), {"workers": 1}, {"a worker on another machine": 2.0}),
        (
            figures(starved=0.5, kv_shrink=1.9, compute=0.1),
            {"workers": 4},
            {"fp8 KV": 1.9, "a worker on another GPU": 1.25},
        ),
        (figures(starved=0.5, kv_shrink=2.0, compute=0.7), {"workers": 40}, {"fp8 KV": 1.43}),
        (
            figures(kv_wait=1.0, network=0.9, wire_shrink=3.9),
            {"workers": 1},
            {"fp8 wire": 3.9, "a worker on another GPU": 2.0},
        ),
        (figures(busy=0.2, bandwidth=0.9), {}, {}),
    ],
)
def test_what_would_relax_it(
    now: WorkerUtilisation, about: dict[str, Any], expected: dict[str, float]
) -> None:
    assert gains(now, **about) == expected


def test_a_pool_is_all_its_workers() -> None:
    one = figures(bandwidth=0.8, busy=1.0, batch=8.0, network=0.1, capacity=0.9)
    idle = figures(bandwidth=0.1, busy=0.25, batch=1.0, network=0.9, capacity=0.1, drafts=False)
    both = combine_workers([one, idle])
    assert both.bandwidth == pytest.approx((0.8 + 0.25 * 0.1) / 1.25)
    assert both.batch == pytest.approx((8 + 0.25) / 1.25)
    assert (both.busy, both.capacity, both.network) == (0.625, 0.5, 0.9)
    assert not both.drafts
    assert combine_workers([figures(busy=0.0)]).compute == 0.0


def record(role: str, walls: WorkerUtilisation | None, **changes: Any) -> WorkerRecord:
    sizes: dict[str, Any] = {"max_model_len": 9, "vocab_size": 9, "kv_bytes_per_token": 9}
    model = ModelInfo(id="m", fingerprint="f", precision="fp8", **sizes)
    where = {"endpoint": "h:1", "kv_endpoint": "h:2", "pid": 1, "engine_pid": 2}
    about = {"instance": "i", "role": role, "model": model, "max_batch": 64}
    return WorkerRecord(**{**where, **about, "walls": walls, **changes})


def test_what_a_record_says_is_checked_for_sense() -> None:
    good = record("decode", figures())
    assert _is_valid_worker(msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=WorkerRecord))
    nan, bad = float("nan"), [("busy", 1.5), ("compute", -0.1), ("kv_shrink", 0.0)]
    for name, value in [*bad, ("batch", float("inf")), ("kv_wait", nan), ("network", nan)]:
        assert not _is_valid_worker(record("decode", figures(**{name: value}))), name
    assert not _is_valid_worker(record("decode", figures(element_bytes=0)))


def test_from_records_to_what_is_shown() -> None:
    records = [
        record("decode", figures(bandwidth=0.71)),
        record("decode", figures(compute=1.0), draining=True),
        record("decode", None),  # just started
        record("prefill", figures(busy=0.1)),
    ]
    registry = CollectorRegistry()
    gauges = WallGauges(registry, "m", "r")
    gauges.show(pool_walls(records[:1]))
    gauges.show(pool_walls(records))
    page = parse_page(generate_latest(registry).decode())
    bound = {(s.labels["role"], s.labels["wall"]): s.value for s in page["baton_binding_wall"]}
    assert len(bound) == 2 * (len(WALLS) + 1)
    assert [key for key, value in bound.items() if value] == [
        ("prefill", "none"),
        ("decode", "bandwidth"),
    ]
    prefill, decode = wall_views([{}, page])
    assert (prefill.wall, prefill.techniques) == (None, [])
    assert prefill.text == "none binds, steps run 10% of the time"
    assert (decode.role, decode.wall, decode.utilization["bandwidth"]) == (
        *("decode", "bandwidth"),
        0.71,
    )
    assert decode.text == (
        "bandwidth 71%; fp8 weights would give 1.6x"
        " (trap: quality must be evaluated; prompts become slower by dequantisation)"
    )


def test_a_pool_that_has_said_nothing_is_not_shown() -> None:
    registry = CollectorRegistry()
    WallGauges(registry, "m", "r").show(pool_walls([record("decode", None)]))
    page = parse_page(generate_latest(registry).decode())
    assert [s.labels["wall"] for s in page["baton_binding_wall"] if s.value] == ["none", "none"]
    assert wall_views([page]) == []


def test_steps_of_overhead_are_called_so() -> None:
    registry = CollectorRegistry()
    now = record("decode", figures(bandwidth=0.1, compute=0.02))
    WallGauges(registry, "m", "r").show(pool_walls([now]))
    [view] = wall_views([parse_page(generate_latest(registry).decode())])
    assert view.text == "none binds, steps are mostly overhead (compute 2%, bandwidth 10%)"


async def test_a_router_tells_what_binds_the_workers_it_knows(start: Start) -> None:
    cluster = await start(outputs())
    slow = record("prefill", figures(compute=0.8, gpu=False), model=cluster.model)
    cluster.prefill = [msgspec.structs.replace(slow, endpoint="127.0.0.1:1")]

    async def bound() -> set[tuple[str, str]]:
        page = parse_page((await cluster.client.get("/metrics")).text)
        found = page["baton_binding_wall"]
        return {(s.labels["role"], s.labels["wall"]) for s in found if s.value}

    async with asyncio.timeout(10):
        while await bound() != {("prefill", "compute"), ("decode", "none")}:
            await asyncio.sleep(0.05)
    page = parse_page((await cluster.client.get("/metrics")).text)
    assert [view.role for view in wall_views([page])] == ["prefill"], "the other says nothing"
