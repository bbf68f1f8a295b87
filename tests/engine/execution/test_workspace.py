"""The parts of an engine's memory on a GPU, against sums made by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bench.lib.settings import engine_settings, speculation_settings
from engine.execution.memory_footprint import (
    RUNTIME_BYTES,
    Footprint,
    GpuMemory,
    estimate_footprint,
    gpu_footprint,
)
from engine.execution.workspace import (
    GpuWork,
    GpuWorkspaceParts,
    Workspace,
    gpu_workspace_parts,
    rotary_bytes,
)
from engine.ipc.settings import SpeculationMethod, StepSizes
from engine.ipc.shared_memory import ArenaShape
from engine.model_config.config import ModelConfig, MoeConfig, RopeConfig
from protocol.roles import Role

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    max_positions=131072,
    tied_embeddings=False,
    eos_token_ids=(128001,),
    rope=RopeConfig(theta=500000.0),
    windows=(0,) * 32,
    attention_scale=128**-0.5,
)
LLAMA_ELEMENTS = 8_030_261_248
GEMMA_2_9B = ModelConfig(
    architecture="Gemma2ForCausalLM",
    vocab_size=256000,
    hidden_size=3584,
    intermediate_size=14336,
    layers=42,
    heads=16,
    kv_heads=8,
    head_dim=256,
    norm_eps=1e-6,
    max_positions=8192,
    tied_embeddings=True,
    eos_token_ids=(1,),
    rope=RopeConfig(),
    windows=(4096, 0) * 21,
    attention_scale=256**-0.5,
    attention_softcap=50.0,
    logit_softcap=30.0,
)
GEMMA_ELEMENTS = 9_241_705_984
SIZES = {"prefill": StepSizes(256, 4096), "decode": StepSizes(256, 2048)}


def work(config: ModelConfig, role: Role = "decode", **fields: object) -> GpuWork:
    made = GpuWork(
        config=config,
        sizes=SIZES[role],
        element=2,
        max_len=8192,
        drafted=0,
        draft_model=False,
        staging=ArenaShape().staging_bytes,
    )
    return replace(made, **fields)


def parts(config: ModelConfig, role: Role = "decode", **fields: object) -> GpuWorkspaceParts:
    return gpu_workspace_parts(work(config, role, **fields))


def test_the_parts_of_llama_3_8b_are_those_counted_by_hand() -> None:
    found = parts(LLAMA_3_8B)
    assert found.frames == Workspace(192 << 20)  # 128 slots in, 64 out, 1 MiB each
    # 257 rows: 257 pages, state, bias, 8224 tokens of history and counts of all tokens. 1026 rows
    # of draws: 126 tiles and a token.
    row = 257 * 8 + 256 + 1024 * 12 + 8224 * 8 + 128256 * 4
    assert found.tables == Workspace(257 * row + 1026 * (126 * 12 + 8)) == Workspace(154_067_432)
    # A piece of 256 tokens has 32 heads of 128 values and an lse, and 8 bytes in the list.
    piece = 32 * 129 * 4 + 8
    assert found.graphs == Workspace(
        256 * (128256 * 4 + 4096 * 2)  # logits and hidden states: 133,431,296
        + 256 * (6 * 4096 + 3 * 14336 + 128256) * 2  # one step: 100,270,080
        + (18 * 7 << 20)  # 18 numbers of sequences, 8 to 33 pieces each in 7 steps
        + 256 * piece,
        0,
        65,
    )
    assert found.libraries == Workspace(128 << 20)
    # 2304 rows through the MLP, and 4096 bytes of K and V with a slot of 8 for each key.
    layers = 2304 * (6 * 4096 + 3 * 14336) * 2 + 2048 * (4096 + 8) + 256 * piece
    assert found.layers == Workspace(layers, 4096 + 8, 65) == Workspace(324_061_184, 4104, 65)
    draw = 2304 * 4096 * 2 + 256 * 128256 * 40
    assert found.draw == Workspace(draw, 256 * 40) == Workspace(1_332_215_808, 10240)
    layers, draw = found.phases
    assert layers == Workspace(1_183_724_000, 4104, 130)
    assert draw == Workspace(2_191_878_632, 10240, 65)


def test_a_prefill_worker_differs_by_the_rows_of_its_chunk() -> None:
    decode, prefill = parts(LLAMA_3_8B), parts(LLAMA_3_8B, "prefill")
    rows = 2048 * (6 * 4096 + 3 * 14336) * 2 + 2048 * 4104
    assert prefill.layers.step - decode.layers.step == rows
    assert prefill.draw.step - decode.draw.step == 2048 * 8192
    assert prefill[:4] == decode[:4]


def test_gemma_2_9b_attends_to_prompts_with_masks_and_scores() -> None:
    found = parts(GEMMA_2_9B)
    masks = (2 + 2) * 2048 * 2  # those of both windows, and two temporary ones
    gathered = 4096 * 2 + 2 * 4096 * 2  # K and V, and the same for 16 heads
    scores = 16 * 2048 * 12
    assert found.layers.context_token == masks + gathered + scores == 434_176
    # 8192 tokens of context: 3.3 GiB, and 6.5 GiB for the chunk of a prefill worker.
    whole = parts(GEMMA_2_9B, "prefill").layers
    assert whole.context_token == 2 * (masks + scores) + gathered == 843_776
    piece = 16 * 257 * 4 + 8
    rows = 2304 * (6 * 3584 + 3 * 14336) * 2
    assert found.layers.step == rows + 256 * piece
    assert found.layers.pool_token == 65  # 64.3


@pytest.mark.parametrize("config", [GEMMA_2_9B, LLAMA_3_8B])
def test_only_what_varlen_attention_computes_needs_no_masks(config: ModelConfig) -> None:
    def context(element: int, **fields: object) -> int:
        return parts(replace(config, **fields), element=element).layers.context_token

    lean = 2 * config.kv_heads * config.head_dim * 2 + 8
    assert context(2, attention_softcap=0.0) == lean
    for element, fields in ((4, {}), (2, {"attention_softcap": 30.0}), (2, {"head_dim": 320})):
        assert context(element, **fields) > 2048 * element


def test_drafts_add_rows_graphs_and_partial_results() -> None:
    plain, ngram = parts(LLAMA_3_8B), parts(LLAMA_3_8B, drafted=8)
    eagle = parts(LLAMA_3_8B, drafted=8, draft_model=True)
    assert ngram.draw.step - plain.draw.step == 256 * (4096 * 2 + 128256 * 40)
    # 8 rows of each sequence in graphs, and 9 in other steps.
    assert ngram.graphs.pool_token == 517 and ngram.layers.pool_token == 581
    assert ngram.graphs.step - plain.graphs.step == ((48 - 18) * 7 << 20) + 256 * 7 * 32 * 129 * 4
    assert eagle.graphs.step - ngram.graphs.step == 256 * 3 * 4096 * 2  # three taps
    assert eagle.layers.step - ngram.layers.step == 2560 * 3 * 4096 * 2


def test_experts_compute_copies_of_every_row() -> None:
    moe = MoeConfig(
        experts=8, per_token=2, intermediate_size=14336, renormalize=True, layers=(True,) * 32
    )
    dense, sparse = parts(LLAMA_3_8B), parts(replace(LLAMA_3_8B, moe=moe))
    more = 2 * (4096 + 3 * 14336) - 3 * 14336
    assert sparse.layers.step - dense.layers.step == 2304 * more * 2
    small = replace(moe, intermediate_size=64, layers=(True, False) * 16)
    assert parts(replace(LLAMA_3_8B, moe=small)).layers == dense.layers


# ---- pools -------------------------------------------------------------------------------------


def sized_pool(
    config: ModelConfig,
    elements: int,
    gpu_bytes: int,
    share: float = 1.0,
    *,
    role: Role = "decode",
    max_len: int = 8192,
    method: SpeculationMethod = "off",
) -> Footprint:
    """Return what an engine takes that is alone with its share of a free GPU."""
    speculation = speculation_settings(method)
    settings = engine_settings("", role, max_model_len=max_len, speculation=speculation)
    weights = elements * 2 + rotary_bytes(config, max_len)
    plan = replace(estimate_footprint(settings, config, None, "cuda"), weights=weights)
    own = weights + RUNTIME_BYTES["cuda"]
    found = gpu_footprint(plan, GpuMemory(total=gpu_bytes, free=gpu_bytes - own, share=share), own)
    assert found.total <= int(gpu_bytes * share * 0.9)
    return found


@pytest.mark.parametrize(
    ("gpu_bytes", "role", "max_len", "tokens"),
    [
        # 72 GB, less 16,060,522,496 of weights, 4,194,304 of rotary tables, 524,288,000 of CUDA,
        # 2,191,878,632 for steps and 8192 * 10240 for the context, by 66,048 + 130 a token
        (80_000_000_000, "decode", 8192, 802_912),
        (80_000_000_000, "prefill", 8192, 802_656),
        # 67,108,864 of rotary tables, 260,536,320 more of tables, 72 more graphs, 131072 * 10240
        (80_000_000_000, "decode", 131072, 777_856),
        (80_000_000_000, "prefill", 131072, 777_600),
        (141_000_000_000, "decode", 8192, 1_632_480),
        (141_000_000_000, "prefill", 8192, 1_632_224),
        (141_000_000_000, "decode", 131072, 1_607_424),
        (141_000_000_000, "prefill", 131072, 1_607_168),
    ],
)
def test_pools_of_llama_3_8b(gpu_bytes: int, role: Role, max_len: int, tokens: int) -> None:
    found = sized_pool(LLAMA_3_8B, LLAMA_ELEMENTS, gpu_bytes, role=role, max_len=max_len)
    assert found.kv_bytes_per_token == 32 * 2 * 8 * 129  # fp8 values and exponents
    assert found.kv_tokens == tokens


@pytest.mark.parametrize(("role", "gib"), [("prefill", 9.9), ("decode", 6.6)])
def test_gemma_2_9b_takes_gigabytes_for_a_step(role: Role, gib: float) -> None:
    found = sized_pool(GEMMA_2_9B, GEMMA_ELEMENTS, 80_000_000_000, role=role)
    assert found.workspace / 2**30 == pytest.approx(gib, abs=0.1)
