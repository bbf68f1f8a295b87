"""The model of a step on a GPU, from a model and a data sheet, for the sizing policy. Pure.

A step reads the weights once, multiplies every row with them, attends, and moves activations; the
GPUs of one worker add up their parts of each layer. These times follow each other:

    step          overhead + weights/B + 2*layers*(g - 1)*hop
    row           FLOPs of its products/F + bytes of activations/B + bytes of all-reduces/N
    kv_token      max(FLOPs of a pair/A, KV bytes/B)
    prompt_token  row, without the logits
    prompt_pair   FLOPs of a pair/A

F, A, B and N are the rates that products, attention, memory and NVLink reach, g the GPUs of a
worker. Reading weights and multiplying add up. The larger one of the two, as in the roofline of
Williams et al. (2009), fits the published throughput of whole engines less well: with constants
fitted to the same 39 rows, their errors are 7% instead of 4% (root of the mean square), and 7
instead of none of the 102 other rows are off by more than 25%. So a step is linear, as in
``protocol/performance/step_model.py``, which workers fit to what they measure.
"""

from __future__ import annotations

import math

import msgspec

from cluster.planner.gpus import GpuSpec, known_gpus
from cluster.planner.model_shape import ModelShape
from cluster.planner.workload import Workload
from cluster.sizing.snapshot import MachineModel
from engine.ipc.settings import default_step_sizes
from engine.memory.memory_footprint import RUNTIME_BYTES
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.speculation.draft_source import catch_up_chunk
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel
from protocol.roles import Role

PLANNED_KV_SHARE = 0.8
"""Share of a GPU's memory beside the weights that holds KV in a plan. A worker counts exactly, with
the shapes of its model and 10% in reserve (``engine/memory/memory_footprint.py``): Llama-3-8B
gets 0.84 on an H200 and 0.78 on an H100."""
PCIE_GB_PER_S = 64.0
"""Of a GPU without NVLink, both directions together."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a data sheet's figures that steps reach, and their overheads.

    Fitted to published figures of TensorRT-LLM, and rounded: ``published.toml`` beside the tests
    says by which rows. An engine of another make may reach less. Workers report their own.
    ``compute``: of products, and of attention in bf16; None: the GPU's own ``compute_share``.
    """

    compute: float | None = None
    bandwidth: float = 0.9
    activations: float = 1.0  # times that elementwise operations move their operands
    links: float = 0.9  # of NVLink
    hop_s: float = 14e-6  # of an all-reduce, for each further GPU
    overhead_s: float = 2e-3  # of a step: kernel launches, sampling, Python code between steps


ASSUMED = Efficiency()


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that the GPUs of a worker reach together with one model."""

    flops: float  # of products with weights
    attention: float  # FLOP/s, in bf16 whatever the weights are
    bytes_s: float
    row_s: float  # activations and all-reduces of a row
    step_s: float  # overhead, and what all-reduces of any size take
    kv_copies: float  # that the GPUs read of each byte of KV

    @property
    def compute_alone(self) -> GpuRates:
        """The same where moving bytes took no time."""
        return msgspec.structs.replace(self, bytes_s=math.inf, row_s=0.0, step_s=0.0)

    @property
    def memory_alone(self) -> GpuRates:
        """The same where computing took no time."""
        return msgspec.structs.replace(self, flops=math.inf, attention=math.inf, step_s=0.0)


def gpu_rates(shape: ModelShape, gpu: GpuSpec, efficiency: Efficiency = ASSUMED) -> GpuRates:
    e, others = efficiency, gpu.count - 1
    compute = gpu.compute_share if e.compute is None else e.compute
    bytes_s = gpu.bytes_s * e.bandwidth
    # A ring sends each byte 2 (g - 1) / g times; NVLink's figure is of both directions.
    link_s = (gpu.nvlink_gb_per_s or PCIE_GB_PER_S) / 2 * 1e9 * e.links
    reduces = 2 * shape.kv.layers  # after attention and after the MLP
    reduced_s = reduces * 2 * others / gpu.count * 2 * shape.hidden / link_s
    return GpuRates(
        flops=gpu.product_flops(shape.weight_element_bytes) * compute,
        attention=gpu.flops * compute,
        bytes_s=bytes_s,
        row_s=e.activations * shape.activation_bytes(gpu.count) / bytes_s + reduced_s,
        step_s=e.overhead_s + reduces * others * e.hop_s,
        kv_copies=shape.kv_copies(gpu.count),
    )


def step_model(shape: ModelShape, at: GpuRates, context: float, batch: float) -> StepModel:
    """Return the model of a step of sequences of ``context`` tokens. Layers with a window, and
    experts that only a larger batch than ``batch`` would read, make it one for this work."""
    cost = shape.cost
    row = cost.row_flops / at.flops + at.row_s
    kv_token = max(
        shape.decode_pair_flops / at.attention, cost.kv_bytes * at.kv_copies / at.bytes_s
    )
    whole = sum(count for window, count in cost.reaches if not window)
    pair = cost.pair_flops / at.attention
    return StepModel(
        step=at.step_s + cost.weight_bytes(max(1, round(batch))) / at.bytes_s,
        row=row + cost.draw_flops / at.flops,
        kv_token=kv_token * (shape.reached(context) / context if context else 0.0),
        prompt_token=row + pair * _reached_in_windows(shape, context),
        prompt_pair=pair * whole,
    )


def _reached_in_windows(shape: ModelShape, context: float) -> float:
    """Return the tokens that a token of a prompt attends to in layers with a window, on average
    over a prompt of ``context`` tokens, summed over these layers."""
    within = ((min(window, context), count) for window, count in shape.cost.reaches if window)
    return sum(count * (near - near**2 / (2 * context)) for near, count in within if near)


def kv_pool_tokens(
    shape: ModelShape,
    gpu: GpuSpec,
    kv_share: float = PLANNED_KV_SHARE,
    draft: ModelShape | None = None,
) -> int:
    """Return about as many tokens as the KV pool of a worker has by default: a share of what is
    free beside the weights. A draft model has weights and KV there, too. Raises StartupError for
    models that do not fit."""
    models = [m for m in (shape, draft) if m is not None]
    token = sum(m.kv_bytes * m.kv_copies(gpu.count) for m in models)
    weights = sum(m.weight_bytes for m in models)
    free = gpu.memory - gpu.count * RUNTIME_BYTES["cuda"] - weights
    tokens = int(max(0.0, free) * kv_share / token) // BLOCK_TOKENS * BLOCK_TOKENS
    if tokens < 2 * BLOCK_TOKENS:
        raise StartupError(_too_large(" and ".join(m.name for m in models), weights, token, gpu))
    return tokens


def _too_large(name: str, weights: float, token: float, gpu: GpuSpec) -> str:
    wanted = (weights + 2 * BLOCK_TOKENS * token) / PLANNED_KV_SHARE
    fitting = [g.name for g in known_gpus().values() if g.memory > wanted]
    alone = gpu.memory / gpu.count - RUNTIME_BYTES["cuda"]
    enough = 2 ** math.ceil(math.log2(max(1.0, wanted / alone)))
    hint = f"it fits {', '.join(fitting)}, or" if fitting else "it needs"
    return (
        f"{name} takes {weights / 2**30:.1f} GiB of weights and {token / 2**20:.3g} MiB of KV for"
        f" each token, more than the {gpu.gib:g} GiB of {gpu.name}; {hint} {enough} of these GPUs"
        f" per worker (--tp {enough})"
    )


def machine_model(
    shape: ModelShape,
    gpu: GpuSpec,
    role: Role,
    *,
    context: float,
    chunk: int | None = None,
    max_batch: int | None = None,
    efficiency: Efficiency = ASSUMED,
    link_bytes_s: float | None = None,
    pool: int | None = None,
    draft: ModelShape | None = None,
) -> MachineModel:
    """Return the machine model of a worker on ``gpu``.

    ``context``: mean tokens of a sequence while it decodes. ``chunk`` and ``max_batch`` None: what
    a worker on a GPU takes by default. ``link_bytes_s`` None: as in the data file. ``pool``: KV
    tokens, None: what the worker would take. ``draft``: a model whose weights and KV take memory
    there, too. Raises StartupError for models that do not fit.
    """
    default = default_step_sizes("cuda", role)
    chunk, max_batch = chunk or default.prefill_chunk, max_batch or default.max_batch
    tokens = kv_pool_tokens(shape, gpu, draft=draft)
    tokens = tokens if pool is None else min(pool, tokens)
    # The rows of a step decide how many experts it reads.
    rows = chunk if role == "prefill" else _full_batch(max_batch, tokens, context)
    model = step_model(shape, gpu_rates(shape, gpu, efficiency), context, rows)
    return MachineModel(
        step=model[:5],
        chunk=chunk,
        max_batch=max_batch,
        kv_tokens=tokens,
        kv_bytes=shape.wire_bytes(shape.codec),
        link_bytes_s=gpu.link_gb_per_s * 1e9 if link_bytes_s is None else link_bytes_s,
    )


def _full_batch(max_batch: int, kv_tokens: int, context: float) -> float:
    """Return the most sequences of ``context`` tokens that decode together."""
    return max(1.0, min(max_batch, kv_tokens / max(1.0, context)))


class DraftingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``acceptance``: of a drafted token once the one before it is accepted. ``model``: that
    drafts, beside the model on the same GPUs; None: drafts cost nothing, as n-grams do. ``most``:
    drafted tokens of a sequence in a step."""

    acceptance: float
    model: ModelShape | None = None
    most: int = 8

    def profile(
        self,
        machine: MachineModel,
        shape: ModelShape,
        gpu: GpuSpec,
        efficiency: Efficiency,
        workload: Workload,
    ) -> SpeculationProfile:
        """Return what ``machine`` would report, a worker with the model ``shape`` on ``gpu``.

        A draft model computes each prompt, too, in chunks beside the steps of the decode worker.
        Workers spread these seconds over the steps of the sequence, and so does this profile: over
        as many as a sequence takes if its drafts had to compute no prompt."""
        target = StepModel(*machine.step)
        free = SpeculationProfile(
            accept=(self.acceptance,) * self.most, row_s=target.row, most_nodes=MAX_DRAFT_NODES
        )
        if self.model is None:
            return free
        context = workload.context
        batch = _full_batch(machine.max_batch, machine.kv_tokens, context)
        draft = step_model(self.model, gpu_rates(self.model, gpu, efficiency), context, batch)
        drafting = msgspec.structs.replace(
            free, per_pass_s=draft.step, per_node_s=draft.row + draft.kv_token * context
        )
        chunk = catch_up_chunk(shape.weight_bytes, self.model.weight_bytes)
        prompt_s = draft.prefill_s(0, round(workload.prompt), chunk)
        tokens = decode_pace(target, drafting, batch, batch * context).tokens
        steps = max(1.0, workload.output / tokens)
        return msgspec.structs.replace(drafting, per_sequence_s=prompt_s / steps)
