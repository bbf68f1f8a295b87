"""Estimates what an engine takes beside its weights and its KV pool, by parts. Pure, without torch.

On a GPU that runs the kernels (sm_80 and later), with rows for all prompt tokens and draws:

    frames     staging memory of KV frames
    tables     block table, sampling parameters, and the token history that penalties need
    graphs     buffers of the recorded steps, their shared pool, and each graph itself
    drafts     the same of the passes of a draft model
    libraries  workspaces of cuBLAS
    layers     the widest moment of a layer, and attention: partial results of decode rows, and the
               keys of prompts, or their masks and scores
    draw       logits and what is computed from them; never at the same time as ``layers``

``memory_footprint`` calls it. A figure that does not follow from shapes is named as an assumption.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.ipc.settings import StepSizes
from engine.model_config.config import ModelConfig, padded_row_counts
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.scheduling.sequence import blocks_for
from engine.speculation.draft_source import DraftSize
from protocol.block_keys import BLOCK_TOKENS
from protocol.sampling_params import MAX_LOGIT_BIAS

_KERNEL_BYTES = 600 << 10  # of oneDNN: code and scratch of one product for one number of rows
_PRODUCTS = 5  # distinct products: those of a layer, and the head
_LOGIT_BYTES = 40
"""Per logit of a draw: fp32 value, copies, fp64 noise or sort order. Rows whose filters allow more
than 8192 tokens take up to 70, from the reserve of a GPU."""

PIECE_TOKENS = 256  # of decode attention, as in engine/kernels/paged_rows.py
_PIECE_BYTES = 8  # an item of a list of pieces
RECORDED_ROWS = 256  # of a step with drafts at most, as in engine/kernels/recording.py
PROMPT_ROWS = 768  # of a recorded step with prompts at most, likewise
RUN_ROWS = 16  # of results that a run of its rows has
PROMPT_GRAPHS = 40  # of steps with prompts, at most
_PLAIN_SHAPES = 18  # numbers of sequences of graphs with one row each
DRAFTED_SHAPES = 36  # and numbers of rows, of graphs with 2, 4, 8 or 16 rows each
PASS_SHAPES = 22  # of passes of a draft model with 2 or 4 rows
MOST_PARTIAL_BYTES = 256 << 20  # of results in one graph, as in engine/kernels/recording.py
_GRAPH_BYTES = 1 << 20  # of one graph of some 400 kernels; an assumption, not measured
_LIBRARY_BYTES = 128 << 20
"""Workspaces of cuBLAS and cuBLASLt for the streams of steps and of recording: 32 MiB each on sm_90
(github.com/pytorch/pytorch/pull/120925)."""
_TAPS = 3  # layers whose inputs an EAGLE-3 head reads
_DRAW_TILE_BYTES = 12  # score and token of the best one of a tile, as in DrawWorkspace
_DRAW_TILE = 1024  # tokens
_STATE_BYTES = 256  # numbers of a sequence in RowState and SamplingTable
_HISTORY_BYTES = 40  # for each token of a sequence with penalties: tokens, indexes, logits, counts
_KEY_BYTES = 8  # slot of a prompt's key
_HIDDEN_ROWS = 6  # alive in a layer: embedding, the caller's two inputs, input, norm and sum
_SCORE_BYTES = 12  # of attention with a soft cap: scores, with the mask, and their softmax, in fp32


class Workspace(msgspec.Struct, frozen=True):
    """Bytes beside weights and KV, as a linear function of two sizes."""

    step: int = 0  # whatever the context
    context_token: int = 0  # for each token of the longest context
    pool_token: int = 0  # for each token of the KV pool

    def bytes(self, context: int, pool: int) -> int:
        return self.step + context * self.context_token + pool * self.pool_token

    def plus(self, *others: Workspace) -> Workspace:
        parts = (self, *others)
        return Workspace(
            sum(part.step for part in parts),
            sum(part.context_token for part in parts),
            sum(part.pool_token for part in parts),
        )


class GpuWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the workspace of an engine on a GPU depends on."""

    config: ModelConfig
    sizes: StepSizes
    element: int  # bytes
    max_len: int
    draft: DraftSize
    staging: int  # bytes for KV frames

    @property
    def draws(self) -> int:
        """Rows of logits."""
        return drawing_rows(self.sizes, self.draft.most)

    @property
    def rows(self) -> int:
        return self.sizes.prefill_chunk + self.draws

    @property
    def taps(self) -> int:
        return _TAPS if self.draft.elements else 0


class GpuWorkspaceParts(NamedTuple):
    """The parts of the workspace on a GPU; see the head of this module."""

    frames: Workspace
    tables: Workspace
    graphs: Workspace
    drafts: Workspace
    libraries: Workspace
    layers: Workspace
    draw: Workspace

    @property
    def phases(self) -> tuple[Workspace, Workspace]:
        """The workspace while layers are computed, and while tokens are drawn."""
        *kept, layers, draw = self
        return layers.plus(*kept), draw.plus(*kept)


def drawing_rows(sizes: StepSizes, drafted: int) -> int:
    """Return the rows of logits in the largest step."""
    return sizes.max_batch + min(sizes.max_batch * drafted, MAX_DRAFT_NODES)


def cpu_workspace(config: ModelConfig, sizes: StepSizes, element: int, drafted: int) -> Workspace:
    """Return the workspace on a CPU. ``drafted`` is the maximum number of draft nodes of a sequence
    in a step."""
    drawing = drawing_rows(sizes, drafted)
    c, rows = config, sizes.prefill_chunk + drawing
    q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    # Input, its norm, projections, what attention returns; gate, up and their product.
    attention = rows * (3 * c.hidden_size + 2 * q + kv)
    mlp = rows * (2 * c.hidden_size + 3 * c.intermediate_size)
    step = max(attention, mlp) * element + drawing * c.vocab_size * _LOGIT_BYTES
    step += len(padded_row_counts(rows)) * _PRODUCTS * _KERNEL_BYTES
    return Workspace(step, (2 * kv + sizes.prefill_chunk) * element)  # a gathered prompt, its mask


def gpu_workspace_parts(work: GpuWork) -> GpuWorkspaceParts:
    """Return the workspace on a GPU by parts."""
    return GpuWorkspaceParts(
        frames=Workspace(work.staging),
        tables=_tables(work),
        graphs=_graphs(work),
        drafts=_draft_passes(work) if work.draft.row_bytes else Workspace(),
        libraries=Workspace(_LIBRARY_BYTES),
        layers=_layers(work),
        draw=_draw(work),
    )


def rotary_bytes(config: ModelConfig, max_len: int) -> int:
    """Return the bytes of the rotary tables, complex64 for each pair and position. They are made
    with the model, and counted with its weights."""
    tables = len({config.rope, config.local_rope or config.rope})
    return tables * max_len * config.head_dim * 4


def _tables(work: GpuWork) -> Workspace:
    """The tables of all rows, one of them padding: pages, bits of grammars, and what is allocated
    when a request with biases or penalties comes."""
    vocab, rows = work.config.vocab_size, work.sizes.max_batch + 1
    pages = blocks_for(work.max_len) + 1
    history = pages * BLOCK_TOKENS * 8 + vocab * 4
    state = pages * 8 + _STATE_BYTES + MAX_LOGIT_BIAS * 12 + -(-vocab // 32) * 4
    draw_rows = 2 * (rows + MAX_DRAFT_NODES)  # engine/execution/device_verifier.py
    draw = -(-vocab // _DRAW_TILE) * _DRAW_TILE_BYTES + 8
    return Workspace(rows * (state + history) + draw_rows * draw)


def _graphs(work: GpuWork) -> Workspace:
    """Logits and hidden states that all graphs share, and the memory pool in which one largest step
    computes."""
    c, drafts = work.config, work.draft.most > 0
    kept, element = max(work.sizes.max_batch, RECORDED_ROWS), work.element
    hidden = (kept + PROMPT_ROWS) * (1 + work.taps) * c.hidden_size * element
    rows = kept if drafts else work.sizes.max_batch
    decode = rows * (_row_elements(c) + c.vocab_size) * element  # logits before fp32
    pool = max(decode, PROMPT_ROWS * _row_elements(c) * element)
    graphs = PROMPT_GRAPHS + most_graphs(work.max_len, DRAFTED_SHAPES if drafts else 0)
    runs = work.sizes.max_batch + PROMPT_ROWS // RUN_ROWS
    results = _recorded_results(work, max(rows, runs * RUN_ROWS), _row_bytes(c))
    return Workspace(kept * c.vocab_size * 4 + hidden + pool + graphs * _GRAPH_BYTES + results)


def _draft_passes(work: GpuWork) -> Workspace:
    """The recorded passes of a draft model. What its layers hold for so few rows is small beside
    the logits, of which a pass has at most as many as there are sequences."""
    logits = work.sizes.max_batch * work.config.vocab_size * (4 + work.element)
    graphs = most_graphs(work.max_len, PASS_SHAPES) * _GRAPH_BYTES
    rows = max(work.sizes.max_batch, RECORDED_ROWS)
    return Workspace(logits + graphs + _recorded_results(work, rows, work.draft.row_bytes))


def most_graphs(max_len: int, drafted_shapes: int) -> int:
    """Return an upper bound of the number of recorded graphs. Those of one shape have bounds of
    pieces that double, from one piece for each sequence to all of the longest context; those with
    several rows a sequence have every other one."""
    doublings = (_longest(max_len) - 1).bit_length()
    return _PLAIN_SHAPES * (1 + doublings) + drafted_shapes * (1 + -(-doublings // 2))


def _longest(max_len: int) -> int:
    """Return the pieces of the longest context."""
    return -(-(blocks_for(max_len) + 1) * BLOCK_TOKENS // PIECE_TOKENS)


def _recorded_results(work: GpuWork, rows: int, row_bytes: int) -> int:
    """Return the bytes of partial results in the largest graph, whose rows have all pieces of the
    longest context each. Those with more run without a graph."""
    # The limit is one of the values, beside which there is an lse for each head.
    most = MOST_PARTIAL_BYTES + MOST_PARTIAL_BYTES // work.config.head_dim
    return min(rows * _longest(work.max_len) * row_bytes, most)


def _row_bytes(config: ModelConfig) -> int:
    """Return the bytes of one row's results and lse in fp32."""
    return config.heads * (config.head_dim + 1) * 4


def _partial_results(work: GpuWork, rows: int) -> Workspace:
    """Partial results and lse in fp32 of decode attention with ``rows`` rows a sequence. The pieces
    are those of the pool, and one that is begun for each sequence; sequences that share a prefix
    may have more, from the reserve."""
    piece = rows * _row_bytes(work.config) + _PIECE_BYTES
    return Workspace(work.sizes.max_batch * piece, 0, -(-piece // PIECE_TOKENS))


def _layers(work: GpuWork) -> Workspace:
    c, element = work.config, work.element
    step = work.rows * (_row_elements(c) + work.taps * c.hidden_size) * element
    prompts = _masked_prompts(work) if _needs_masks(c, element) else _gathered_prompts(work)
    return Workspace(step).plus(prompts, _partial_results(work, 1 << work.draft.most.bit_length()))


def _row_elements(config: ModelConfig) -> int:
    """Return the elements of a row at the widest moment of a layer: attention with its projection,
    result and copies of queries and result, or the MLP."""
    c = config
    attention = 4 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim
    mlp = 3 * c.intermediate_size
    if (moe := c.moe) is not None:
        # Rows sorted by expert, gate, up and their product; then the outputs in three orders.
        expert = moe.per_token * max(c.hidden_size + 3 * moe.intermediate_size, 3 * c.hidden_size)
        mlp = expert if all(moe.layers) else max(mlp, expert)
    return _HIDDEN_ROWS * c.hidden_size + max(attention, mlp)


def _needs_masks(config: ModelConfig, element: int) -> bool:
    """Return whether prompts attend with masks, as ``runs_varlen`` in engine/model/fused_layers.py
    decides."""
    varlen = element == 2 and config.head_dim <= 256 and config.head_dim % 8 == 0
    return bool(config.attention_softcap) or not varlen


def _gathered_prompts(work: GpuWork) -> Workspace:
    """K and V of the keys of one layer: those of the longest prompt, and one for each other row of
    the step. Chunks behind cached prefixes may have more in one step, from the reserve."""
    key = 2 * work.config.kv_heads * work.config.head_dim * work.element + _KEY_BYTES
    return Workspace(work.sizes.prefill_chunk * key, key)


def _masked_prompts(work: GpuWork) -> Workspace:
    """The masks of all windows with two temporary ones, and of one prompt at a time its K and V,
    gathered, repeated for all query heads, and the scores."""
    c, element, rows = work.config, work.element, work.sizes.prefill_chunk
    q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    masks = (len(set(c.windows)) + 2) * rows * element
    # Bytes as stored, and values before their scales; then the repeated heads, and K once more in
    # the order of the product.
    gathered = kv * element + max(kv * (1 + element), 3 * q * element)
    scores = c.heads * rows * _SCORE_BYTES if c.attention_softcap else 0
    return Workspace(0, masks + gathered + scores)


def _draw(work: GpuWork) -> Workspace:
    """Logits of the rows that draw, while the hidden states of all rows exist. The history of all
    rows is read as wide as the longest one."""
    hidden = work.rows * work.config.hidden_size * work.element
    logits = work.draws * work.config.vocab_size * _LOGIT_BYTES
    return Workspace(hidden + logits, work.sizes.max_batch * _HISTORY_BYTES)
