"""The draw of a step whose rows are greedy or have a temperature and nothing else.

    draw_tiles     grid (rows, tiles of the vocabulary)   the best token of each tile
    draw_winners   grid (rows)                            the best of these; updates the state

The reference is ``sample_unfiltered`` and, for greedy rows, ``Tensor.max`` on a CPU. The token of a
row is the same one: with noise in fp64, the lowest id among equal scores, the first NaN if there is
one, and token 0 where a grammar allows nothing.

Two logarithms in fp64 for every token would take longer than the rest. They are computed in fp32
for all tokens, and in fp64 for those within MARGIN of the best one, which is seldom more than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64, as in engine/sampling/filters.py
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
MARGIN = tl.constexpr(1e-3)
"""A hundred times the error of noise in fp32, with the hardware's approximate logarithm."""

_PER_ROW = [
    *("state_row_ptr", "owner_ptr", "row_count_ptr", "position_ptr", "bits_ptr", "bits_row_ptr"),
    *("drawn_ptr", "temperature_ptr", "key_ptr", "length_ptr", "last_token_ptr"),
]
"""Their alignment may change from step to step, and must not make Triton compile again."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def _uniform(row_key, tokens):
    """Return the uniform numbers of tokens, fp64 in (0, 1]: the latter once in 2^53."""
    bits = _mix(row_key + (tokens + 1).to(tl.uint64) * _GAMMA) >> 11
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _rough_gumbel(uniform):
    """Return -log(-log(uniform)) in fp32 within 1e-5."""
    rest = (1.0 - uniform).to(tl.float32)
    # Close to 1 the logarithm loses its digits, and its series has few terms.
    series = rest * (1.0 + rest * (0.5 + rest * (0.3333333333 + rest * 0.25)))
    minus_log = tl.where(rest < 0.015625, series, -tl.log(uniform.to(tl.float32)))
    return -tl.log(minus_log)


@triton.jit
def _exact_score(logit_ptr, token, temperature, row_key):
    scaled = tl.div_rn(tl.load(logit_ptr + token), temperature)
    return -tl.log(-tl.log(_uniform(row_key, token))) + scaled.to(tl.float64)


@triton.jit
def _candidates(score, inside, margin):
    """Return which of the scores may be the greatest, which is any NaN where there is one, and the
    greatest score itself, both as far as scores are known."""
    nan = score != score
    has_nan = tl.max(nan.to(tl.int32), 0) > 0
    peak = tl.max(tl.where(nan, -float("inf"), score), 0)
    near = tl.where(has_nan, nan, score >= peak - margin) & inside
    return near, tl.where(has_nan, float("nan"), peak)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def draw_tiles(
    logits_ptr,  # [R, vocab] fp32
    logits_stride,
    state_row_ptr,  # [S] int64
    owner_ptr,  # [R] int64, or None: row r belongs to sequence r
    row_count_ptr,  # [S] int64, or None
    position_ptr,  # [R] int64, or None: the last one of the sequence
    length_ptr,  # [rows] int64
    temperature_ptr,  # [rows] fp32; 0: greedy
    temperature_stride,
    key_ptr,  # [rows] int64
    key_stride,
    bits_ptr,  # [masks, words] int32, or None
    bits_stride,
    bits_row_ptr,  # [R] int32, or None
    score_ptr,  # [R, tiles] fp64
    token_ptr,  # [R, tiles] int32
    vocab,
    TILE: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sequence = r
    if owner_ptr is not None:
        sequence = tl.load(owner_ptr + r)
    row_count = 1
    if row_count_ptr is not None:
        row_count = tl.load(row_count_ptr + sequence)
    if row_count == 0:
        return
    row = tl.load(state_row_ptr + sequence)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < vocab
    own_ptr = logits_ptr + r * logits_stride
    logits = tl.load(own_ptr + tokens, mask=inside, other=-float("inf"))
    if bits_ptr is not None:
        mask = tl.load(bits_row_ptr + r).to(tl.int64)
        bound = inside & (mask >= 0)
        words = tl.load(bits_ptr + mask * bits_stride + (tokens >> 5), mask=bound, other=-1)
        logits = tl.where(((words >> (tokens & 31)) & 1) != 0, logits, -float("inf"))

    temperature = tl.load(temperature_ptr + row * temperature_stride)
    if temperature == 0:
        near, best = _candidates(logits.to(tl.float64), inside, 0.0)
        winner = tl.min(tl.where(near, tokens, vocab), 0)
    else:
        if position_ptr is not None:
            position = tl.load(position_ptr + r) + 1
        else:
            position = tl.load(length_ptr + row)
        key = tl.load(key_ptr + row * key_stride).to(tl.uint64)
        row_key = _mix(key ^ (position.to(tl.uint64) * _MIX1))
        scaled = tl.div_rn(logits, temperature).to(tl.float64)
        noise = _rough_gumbel(_uniform(row_key, tokens)).to(tl.float64)
        # A token that is not allowed stays at -inf also with the noise inf.
        score = tl.where(scaled == -float("inf"), scaled, scaled + noise)
        near, best = _candidates(score, inside, MARGIN)
        winner = tl.min(tl.where(near, tokens, vocab), 0)
        if tl.abs(best) < float("inf"):  # to NaN and inf, noise makes no difference
            best = _exact_score(own_ptr, winner, temperature, row_key)
            near = near & (tokens != winner)
            while tl.max(near.to(tl.int32), 0) > 0:
                other = tl.min(tl.where(near, tokens, vocab), 0)
                score_of_other = _exact_score(own_ptr, other, temperature, row_key)
                winner = tl.where(score_of_other > best, other, winner)
                best = tl.maximum(score_of_other, best)
                near = near & (tokens != other)
    at = r * tl.num_programs(1) + tile
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, winner)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def draw_winners(
    score_ptr,  # [R, tiles] fp64
    token_ptr,  # [R, tiles] int32
    tiles,
    state_row_ptr,  # [S] int64
    row_count_ptr,  # [S] int64, or None
    owner_ptr,  # [R] int64, or None: row r belongs to sequence r
    drawn_ptr,  # [R] int64
    last_token_ptr,  # [rows] int64
    length_ptr,  # [rows] int64
    UPDATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    sequence = r
    if owner_ptr is not None:
        sequence = tl.load(owner_ptr + r)
    row_count = 1
    if row_count_ptr is not None:
        row_count = tl.load(row_count_ptr + sequence)
    if row_count == 0:
        tl.store(drawn_ptr + r, 0)
        return
    at = tl.arange(0, WIDTH)
    inside = at < tiles
    scores = tl.load(score_ptr + r * tiles + at, mask=inside, other=-float("inf"))
    tokens = tl.load(token_ptr + r * tiles + at, mask=inside, other=0x7FFFFFFF)
    near, _ = _candidates(scores, inside, 0.0)
    winner = tl.min(tl.where(near, tokens, 0x7FFFFFFF), 0).to(tl.int64)
    tl.store(drawn_ptr + r, winner)
    if UPDATE:
        row = tl.load(state_row_ptr + sequence)
        tl.store(last_token_ptr + row, winner)
        tl.store(length_ptr + row, tl.load(length_ptr + row) + 1)


@dataclass(frozen=True)
class DrawState:
    """The tensors by state row that a draw reads and updates: [rows] each."""

    temperature: Tensor  # float32, a column of ``SamplingTable.floats``; 0: greedy
    keys: Tensor  # int64, a column of ``SamplingTable.ints``
    length: Tensor  # int64, contiguous
    last_token: Tensor  # int64, contiguous


@dataclass(frozen=True)
class DrawRows:
    """What the R rows of the logits stand for, of S sequences."""

    state_row: Tensor  # [S] int64
    # [S] int64; 0 for a sequence that is padding. Its rows draw token 0 and update nothing.
    row_count: Tensor | None = None
    owner: Tensor | None = None  # [R] int64, sequence of each row; None: sequence r has the row r
    # [R] int64, position of each row's token, which the drawn one follows; None: the sequence's
    # last one
    positions: Tensor | None = None


@dataclass(frozen=True)
class GrammarBits:
    """Packed masks of allowed tokens, in memory that the host may fill again for the next step."""

    bits: Tensor  # [masks, words] int32, 32 tokens per word, the lowest bit first
    rows: Tensor  # [R] int32, the mask of each row of the logits; -1: every token is allowed


class DrawWorkspace:
    """Memory for the draws of up to ``rows`` rows, allocated once so that a CUDA graph can contain
    them. The engine that launches the kernels owns it."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        tiles = triton.cdiv(vocab, _TILE)
        self.scores = torch.empty((rows, tiles), dtype=torch.float64, device=device)
        self.tokens = torch.empty((rows, tiles), dtype=torch.int32, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=device)


def draw_tokens(
    logits: Tensor,
    rows: DrawRows,
    state: DrawState,
    workspace: DrawWorkspace,
    *,
    grammar: GrammarBits | None = None,
    update: bool = True,
) -> Tensor:
    """Draw a token for each row of logits [R, vocab] fp32, of which each row is contiguous. Return
    them as [R] int64, a part of the workspace.

    With ``update``, the token becomes the last one of its sequence and the length grows by one;
    every sequence must have one row then.
    """
    count, vocab = logits.shape
    tiles = workspace.scores.shape[1]
    drawn = workspace.drawn[:count]
    bits = None if grammar is None else grammar.bits
    assert tiles == triton.cdiv(vocab, _TILE) and count <= len(workspace.drawn)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bits is None or bits.shape[1] * 32 >= vocab
    draw_tiles[(count, tiles)](
        *(logits, logits.stride(0), rows.state_row, rows.owner, rows.row_count, rows.positions),
        *(state.length, state.temperature, state.temperature.stride(0)),
        *(state.keys, state.keys.stride(0)),
        *(bits, 0 if bits is None else bits.stride(0)),
        None if grammar is None else grammar.rows,
        *(workspace.scores, workspace.tokens, vocab),
        TILE=_TILE,
        num_warps=4,
    )
    draw_winners[(count,)](
        *(workspace.scores, workspace.tokens, tiles, rows.state_row, rows.row_count, rows.owner),
        *(drawn, state.last_token, state.length),
        UPDATE=update,
        WIDTH=triton.next_power_of_2(tiles),
        num_warps=4,
    )
    return drawn
