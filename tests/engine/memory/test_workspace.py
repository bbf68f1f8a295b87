"""The parts of an engine's memory on a GPU, against sums made by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bench.lib.settings import engine_settings, speculation_settings
from cluster.doctor import memory
from cluster.doctor.gpus import GpuDevice
from cluster.doctor.memory import MemoryFacts, PoolEngines
from cluster.doctor.subject import DoctorSubject, SubjectPool
from engine.ipc.settings import SpeculationMethod, StepSizes
from engine.ipc.shared_memory import ArenaShape
from engine.memory.memory_footprint import (
    RUNTIME_BYTES,
    Footprint,
    GpuMemory,
    estimate_footprint,
    gpu_footprint,
)
from engine.memory.workspace import (
    GpuWork,
    GpuWorkspaceParts,
    Workspace,
    gpu_workspace_parts,
    rotary_bytes,
)
from engine.model_config.config import ModelConfig, MoeConfig, RopeConfig
from engine.speculation.draft_source import DraftSize
from protocol.errors import StartupError
from protocol.roles import Role
from tests.engine.execution.llama_3_8b import LLAMA_3_8B

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
        draft=DraftSize(),
        staging=ArenaShape().staging_bytes,
    )
    return replace(made, **fields)


def parts(config: ModelConfig, role: Role = "decode", **fields: object) -> GpuWorkspaceParts:
    return gpu_workspace_parts(work(config, role, **fields))


def test_the_parts_of_llama_3_8b_are_those_counted_by_hand() -> None:
    found = parts(LLAMA_3_8B)
    assert found.frames == Workspace(128 << 20)  # 16 slots in, 16 out, 4 MiB each
    # 257 rows: 257 pages, state, bias, 4008 words of bits, 8224 tokens of history and counts of all
    # tokens. 1026 rows of draws: 126 tiles and a token.
    row = 257 * 8 + 256 + 1024 * 12 + 4008 * 4 + 8224 * 8 + 128256 * 4
    assert found.tables == Workspace(257 * row + 1026 * (126 * 12 + 8)) == Workspace(158_187_656)
    # A piece of 256 tokens has 32 heads of 128 values and an lse, and 8 bytes in the list.
    piece = 32 * 129 * 4 + 8
    assert found.graphs == Workspace(
        256 * (128256 * 4 + 4096 * 2)  # logits and hidden states: 133,431,296
        + 768 * 4096 * 2  # hidden states of a step with prompts
        + 768 * (6 * 4096 + 3 * 14336) * 2  # one step with prompts: 103,809,024
        # 18 numbers of sequences, 8 to 33 pieces each in 7 steps, and those with prompts
        + (18 * 7 + 40 << 20)
        # Partial results of 768 runs with 33 pieces each would be more than their limit.
        + (256 << 20) * 129 // 128
    )
    assert found.drafts == Workspace()
    assert found.libraries == Workspace(128 << 20)
    # 2304 rows through the MLP, and 4096 bytes of K and V with a slot of 8 for each key.
    layers = 2304 * (6 * 4096 + 3 * 14336) * 2 + 2048 * (4096 + 8) + 256 * piece
    assert found.layers == Workspace(layers, 4096 + 8, 65) == Workspace(324_061_184, 4104, 65)
    draw = 2304 * 4096 * 2 + 256 * 128256 * 40
    assert found.draw == Workspace(draw, 256 * 40) == Workspace(1_332_215_808, 10240)
    while_layers, while_drawing = found.phases
    assert while_layers == Workspace(1_438_812_296, 4104, 65)
    assert while_drawing == Workspace(2_446_966_920, 10240)


def test_a_prefill_worker_differs_by_the_rows_of_its_chunk() -> None:
    decode, prefill = parts(LLAMA_3_8B), parts(LLAMA_3_8B, "prefill")
    rows = 2048 * (6 * 4096 + 3 * 14336) * 2 + 2048 * 4104
    assert prefill.layers.step - decode.layers.step == rows
    assert prefill.draw.step - decode.draw.step == 2048 * 8192
    assert prefill[:4] == decode[:4]


def test_gemma_2_9b_attends_to_prompts_with_masks_and_scores() -> None:
    found = parts(GEMMA_2_9B)
    masks = (2 + 2) * 2048 * 2  # those of both windows, and two temporary ones
    gathered = 4096 * 2 + 3 * 4096 * 2  # K and V, the same for 16 heads, and K once more
    scores = 16 * 2048 * 12
    assert found.layers.context_token == masks + gathered + scores == 442_368
    # 8192 tokens of context: 3.3 GiB, and 6.5 GiB for the chunk of a prefill worker.
    whole = parts(GEMMA_2_9B, "prefill").layers
    assert whole.context_token == 2 * (masks + scores) + gathered == 851_968
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
    plain, ngram = (parts(LLAMA_3_8B, draft=DraftSize(most)) for most in (0, 8))
    eagle = parts(LLAMA_3_8B, draft=DraftSize(8, 10**9))
    assert ngram.draw.step - plain.draw.step == 256 * (4096 * 2 + 128256 * 40)
    # 36 more shapes of graphs, 8 to 33 pieces in 4 steps.
    assert ngram.graphs.step - plain.graphs.step == 36 * 4 << 20
    row = 32 * 129 * 4
    # A step that is not recorded has 16 rows of each sequence for up to 8 drafts.
    assert ngram.layers.pool_token == -(-(16 * row + 8) // 256) == 1033
    taps = (256 + 768) * 3 * 4096 * 2
    assert eagle.graphs.step - ngram.graphs.step == taps
    assert eagle.layers.step - ngram.layers.step == 2560 * 3 * 4096 * 2


def test_a_draft_model_has_recorded_passes_of_its_own() -> None:
    row = 32 * 65 * 4  # Llama-3.2-1B
    drafts = parts(LLAMA_3_8B, draft=DraftSize(8, 10**9, 32768, row)).drafts
    graphs = 18 * 7 + 22 * 4 << 20
    assert drafts == Workspace(256 * 128256 * 6 + graphs + 256 * 33 * row)
    long = parts(LLAMA_3_8B, draft=DraftSize(8, 10**9, 32768, row), max_len=131072).drafts
    graphs = 18 * 11 + 22 * 6 << 20
    assert long == Workspace(256 * 128256 * 6 + graphs + (258 << 20))  # the limit, and its lse


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
        # 72,000,000,000, less 16,060,522,496 for weights, 4,194,304 for rotary tables, 524,288,000
        # for CUDA, 2,446,966,920 for draws and what is kept, and 8192 * 10,240 for the history:
        # 52,880,142,200, in pages of 32 * 66,048
        (80_000_000_000, "decode", 8192, 800_608),
        (80_000_000_000, "prefill", 8192, 800_352),  # 2048 * 8192 less
        # less 62,914,560 for rotary tables, 260,536,320 for tables, 72 MiB for graphs, and
        # 122,880 * 10,240 for the history
        (80_000_000_000, "decode", 131072, 775_520),
        (80_000_000_000, "prefill", 131072, 775_264),
        # 126,900,000,000, less the same
        (141_000_000_000, "decode", 8192, 1_631_840),
        (141_000_000_000, "prefill", 8192, 1_631_584),
        (141_000_000_000, "decode", 131072, 1_606_752),
        (141_000_000_000, "prefill", 131072, 1_606_496),
    ],
)
def test_pools_of_llama_3_8b(gpu_bytes: int, role: Role, max_len: int, tokens: int) -> None:
    found = sized_pool(LLAMA_3_8B, LLAMA_ELEMENTS, gpu_bytes, role=role, max_len=max_len)
    assert found.kv_bytes_per_token == 32 * 2 * 8 * 129  # fp8 values and exponents
    assert found.kv_tokens == tokens


@pytest.mark.parametrize(
    ("role", "step", "tokens"),
    [
        # 1,742,192,264 and 8192 * 442,368 of 52,983,911,424, by 42 * 2 * 8 * 257 + 65 a token
        ("decode", 5_366_070_920, 275_584),
        ("prefill", 8_985_755_272, 254_656),
    ],
)
def test_pools_of_gemma_2_9b(role: Role, step: int, tokens: int) -> None:
    found = sized_pool(GEMMA_2_9B, GEMMA_ELEMENTS, 80_000_000_000, role=role)
    assert found.kv_tokens == tokens
    assert found.workspace == step + 65 * tokens


def test_two_engines_of_llama_3_8b_share_80_gb_and_four_do_not() -> None:
    half = sized_pool(LLAMA_3_8B, LLAMA_ELEMENTS, 80_000_000_000, 0.5, max_len=131072)
    assert half.kv_tokens == 230_464
    drafting = sized_pool(
        LLAMA_3_8B, LLAMA_ELEMENTS, 80_000_000_000, 0.5, max_len=131072, method="ngram"
    )
    assert 131072 <= drafting.kv_tokens < half.kv_tokens  # one sequence of the maximum length
    with pytest.raises(StartupError) as raised:
        sized_pool(LLAMA_3_8B, LLAMA_ELEMENTS, 80_000_000_000, 0.25)
    for text in (
        "a KV pool of 64 tokens does not fit on the GPU (not even the smallest pool fits): 74.5"
        " GiB in",
        "16.8 GiB for this engine (25% of the GPU, less a reserve)",
        "15.0 GiB for weights, 0.0 GiB for 64 tokens of KV, 2.3 GiB for steps, 0.5 GiB for CUDA",
        "fewer workers on each GPU",
    ):
        assert text in str(raised.value)


@pytest.mark.parametrize(("share", "level"), [(0.5, "ok"), (0.25, "problem")])
def test_the_doctor_says_whether_two_engines_fit_on_80_gb(share: float, level: str) -> None:
    engines = []
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role in roles:
        settings = engine_settings("", role, max_model_len=8192, gpu_share=share)
        plan = estimate_footprint(settings, LLAMA_3_8B, None, "cuda")
        weights = LLAMA_ELEMENTS * 2 + rotary_bytes(LLAMA_3_8B, 8192)
        engines.append(PoolEngines(role, 1, replace(plan, weights=weights)))
    card = GpuDevice(0, "H100", 80_000_000_000, 80_000_000_000, "")
    facts = MemoryFacts(total=256 << 30, free=200 << 30, gpus=(card,), engines=tuple(engines))
    pools = (SubjectPool("decode", 2, settings),)
    host, found = memory.judge(facts, DoctorSubject(ports=(8000,), pools=pools))
    assert (host.level, found.level) == ("ok", level)
    assert "74.5 GiB free" in found.text
    assert (found.level == "ok") == ("an engine needs" not in found.text)
