"""What an engine takes of memory, and how engines share a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.lib.settings import engine_settings, speculation_settings
from cluster.models import locate
from engine.ipc.settings import DeviceKind, SpeculationMethod, StepSizes
from engine.memory.memory_footprint import (
    RUNTIME_BYTES,
    Footprint,
    GpuMemory,
    estimate_footprint,
    gpu_footprint,
)
from engine.memory.workspace import Workspace
from engine.model_config.checkpoint import load_config
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.roles import Role

GIB = 1 << 30
RUNTIME = RUNTIME_BYTES["cuda"]
DEMO = locate.demo_path()


def sized(method: SpeculationMethod, max_batch: int, max_tokens: int) -> Footprint:
    speculation = speculation_settings(method, max_tokens=max_tokens)
    spec = engine_settings(
        str(DEMO), max_batch=max_batch, prefill_chunk=64, speculation=speculation
    )
    return estimate_footprint(spec, load_config(DEMO), None, "cuda")


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 1), (4, 8), (16, 16), (64, 8)])
def test_every_draft_node_needs_a_row_of_logits(max_batch: int, max_tokens: int) -> None:
    plain, with_nodes = (sized(m, max_batch, max_tokens) for m in ("off", "ngram"))
    nodes = min(max_batch * max_tokens, MAX_DRAFT_NODES)
    logits = 4 * load_config(DEMO).vocab_size  # of a row in fp32, once at least
    more = with_nodes.workspace - plain.workspace
    assert more > nodes * logits
    assert with_nodes.kv == plain.kv and with_nodes.weights == plain.weights


def test_draft_nodes_beyond_the_step_limit_need_no_logits() -> None:
    assert sized("ngram", 64, 4).phases[1] == sized("ngram", 64, 16).phases[1]


def test_method_without_drafts_needs_no_memory() -> None:
    assert sized("draft", 8, 8) == sized("off", 8, 8)  # no folder is given


# ---- sizes of a step by device ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "role", "expected"),
    [
        ("cpu", "decode", StepSizes(64, 512)),
        ("cpu", "prefill", StepSizes(64, 512)),
        ("cuda", "decode", StepSizes(256, 2048)),
        ("cuda", "prefill", StepSizes(256, 4096)),
    ],
)
def test_sizes_that_are_not_configured_follow_the_device(
    device: DeviceKind, role: Role, expected: StepSizes
) -> None:
    assert engine_settings("", role).step_sizes(device) == expected
    configured = engine_settings("", role, max_batch=7, prefill_chunk=9)
    assert configured.step_sizes(device) == StepSizes(7, 9)


def test_footprint_is_that_of_the_default_sizes() -> None:
    config = load_config(DEMO)
    for device, sizes in (("cpu", (64, 512)), ("cuda", (256, 2048))):
        explicit = engine_settings("", max_batch=sizes[0], prefill_chunk=sizes[1])
        found = [
            estimate_footprint(settings, config, None, device)  # type: ignore[arg-type]
            for settings in (engine_settings(""), explicit)
        ]
        assert found[0] == found[1]


# ---- two engines on one GPU -------------------------------------------------------------------


def on_gpu(weights: int = 16 * GIB, **fields: object) -> Footprint:
    """An engine of 64 KiB of KV a token, whose step takes 1 GiB and 16 KiB a token of context."""
    plan = Footprint(
        device="cuda",
        dtype="bfloat16",
        weights=weights,
        kv=8192 << 16,
        workspace=GIB + (8192 << 14),
        runtime=RUNTIME,
        shared=0,
        kv_tokens=8192,
        kv_bytes_per_token=1 << 16,
        kv_grows=True,
        phases=(Workspace(GIB // 2, 1 << 13, 8), Workspace(GIB, 1 << 14)),
        max_len=8192,
    )
    return replace(plan, **fields)


def start_in_turn(total: int, plans: list[Footprint], shares: list[float]) -> list[Footprint]:
    """Size the pools of engines that start one after the other and fill their pools at once."""
    found, taken = [], 0
    for plan, share in zip(plans, shares, strict=True):
        own = plan.weights + plan.runtime
        gpu = GpuMemory(total=total, free=total - taken - own, share=share)
        found.append(gpu_footprint(plan, gpu, own))
        taken += found[-1].total
    assert taken <= total
    return found


def test_engines_that_share_a_gpu_get_equal_pools_whoever_comes_first() -> None:
    first, second = start_in_turn(80 * GIB, [on_gpu(), on_gpu()], [0.5, 0.5])
    assert first == second
    assert first.total <= 36 * GIB < first.total + (BLOCK_TOKENS << 16)
    (alone,) = start_in_turn(80 * GIB, [on_gpu()], [1.0])
    assert alone.kv_tokens > 2 * first.kv_tokens


@given(
    total=st.integers(8 * GIB, 192 * GIB),
    weights=st.integers(GIB // 2, 40 * GIB),
    share=st.floats(0.2, 1.0),
    free=st.floats(0.0, 1.0),
    max_len=st.sampled_from([64, 4096, 131072]),
)
def test_an_engine_stays_within_its_share_and_what_is_free(
    total: int, weights: int, share: float, free: float, max_len: int
) -> None:
    plan, own = on_gpu(weights, max_len=max_len), weights + RUNTIME
    gpu = GpuMemory(total=total, free=int(free * max(0, total - own)), share=share)
    try:
        found = gpu_footprint(plan, gpu, own)
    except StartupError as error:
        assert "GiB for weights" in str(error)
        return
    assert found.kv_tokens >= 2 * BLOCK_TOKENS and found.kv_tokens % BLOCK_TOKENS == 0
    assert found.total <= gpu.allowed
    assert found.kv + found.workspace <= gpu.free
    # One page more would be too much.
    more = found.with_pool(found.kv_tokens + BLOCK_TOKENS)
    assert more.total > gpu.allowed or more.kv + more.workspace > gpu.free - gpu.reserve


def test_weights_of_a_draft_that_are_still_to_be_loaded_are_counted() -> None:
    plan = on_gpu(weights=20 * GIB)  # of which 4 GiB are a draft's
    gpu = GpuMemory(total=80 * GIB, free=60 * GIB)
    assert gpu_footprint(plan, gpu, 16 * GIB + RUNTIME) == gpu_footprint(
        plan, replace(gpu, free=56 * GIB), 20 * GIB + RUNTIME
    )


def test_a_context_that_no_pool_holds_takes_no_workspace() -> None:
    gpu = GpuMemory(total=24 * GIB, free=7 * GIB)
    long = on_gpu(max_len=131072)
    found = gpu_footprint(long, gpu, long.weights + RUNTIME)
    assert 0 < found.kv_tokens < 131072
    assert found.workspace == GIB + (found.kv_tokens << 14)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"kv_grows": False, "kv_tokens": 1_000_000},
            ("1000000 tokens does not fit", "lower worker.kv_tokens, worker.max_batch"),
        ),
        ({"phases": (Workspace(30 * GIB),)}, ("not even the smallest", "30.0 GiB for steps")),
        ({"weights": 37 * GIB}, ("37.0 GiB for weights", "fewer workers on each GPU")),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(
    fields: dict[str, object], says: tuple[str, ...]
) -> None:
    plan = on_gpu(**fields)  # type: ignore[arg-type]
    own = plan.weights + plan.runtime
    gpu = GpuMemory(total=80 * GIB, free=max(0, 80 * GIB - own), share=0.5)
    with pytest.raises(StartupError) as raised:
        gpu_footprint(plan, gpu, own)
    for text in (*says, "80.0 GiB in all", "36.0 GiB for this engine (50% of the GPU"):
        assert text in str(raised.value)


def test_a_configured_pool_that_fits_is_taken_as_it_is() -> None:
    plan = on_gpu(kv_grows=False, kv_tokens=4096)
    gpu = GpuMemory(total=80 * GIB, free=60 * GIB)
    assert gpu_footprint(plan, gpu, plan.weights + RUNTIME).kv_tokens == 4096
