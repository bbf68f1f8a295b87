"""Top-k, top-p and min-p filters: a token is allowed if its scaled logit reaches a threshold.

Min-p is applied first, then top-k, then top-p on the rest (the order of vLLM and transformers).
Each keeps the head of the tokens in order of probability, so one number describes what is left.
Tokens that tie with the last allowed one are allowed, too: the set does not depend on how ties are
sorted.

Noise is needed at the allowed tokens only. They are searched among the ``TOP_COUNTS[0]`` most
likely tokens; rows whose set does not end there search further. The result is the same either way.

Sampling noise has no state: it is a function of (seed, choice, position, token).

    token = argmax over allowed tokens of  logits / temperature + Gumbel(seed, choice, position, t)

The Gumbel-max trick (Gumbel 1954; Maddison et al., A* Sampling, 2014, section 2) draws exactly from
softmax(logits / temperature). The noise comes from a counter-based generator, SplitMix64 (Steele,
Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, section 4), so a token
does not depend on the batch, on speculation, or on the worker that draws it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.uploads import read_back, upload

TOP_COUNTS = (64, 1024, 8192)
"""On a CPU, it takes 4, 17 and 46 ms to find so many in 32 rows of 128k logits, 340 ms to sort."""


@dataclass(frozen=True)
class FilterRows:
    """Filters of the rows, one element per row: [rows]."""

    top_p: Tensor  # [rows] float32; 1: off
    top_k: Tensor  # [rows] int64; the vocabulary's size or more: off
    min_p: Tensor  # [rows] float32; 0: off
    any_top_p: bool  # whether any row has a top_p
    any_only_top_p: bool  # whether any row has a top_p and no other filter

    def select(self, rows: Tensor | slice) -> FilterRows:
        """Return the filters of ``rows``, [S] int64 or a slice."""
        return FilterRows(
            *(self.top_p[rows], self.top_k[rows], self.min_p[rows]),
            *(self.any_top_p, self.any_only_top_p),
        )


def filter_threshold(scaled: Tensor, head: Tensor, filters: FilterRows) -> Tensor:
    """Compute the least scaled logit that is allowed: [rows, 1].

    scaled: [rows, vocab], logits / temperature. head: [rows, k], the k greatest of these, greatest
    first. The result is right where it is above the last of ``head`` or ``head`` is the whole row;
    elsewhere it is too high.

    min-p: Nguyen et al., Turning Up the Heat, 2024, section 3. top-k: Fan et al., Hierarchical
    Neural Story Generation, 2018, section 5.4. top-p: Holtzman et al., The Curious Case of Neural
    Text Degeneration, 2019, section 3.1: the smallest set whose probability reaches it.
    """
    peak = head[:, :1]
    last = (filters.top_k - 1).clamp(max=head.shape[1] - 1)[:, None]
    kth = head.gather(1, last)
    kth.masked_fill_(filters.top_k[:, None] >= scaled.shape[1], float("-inf"))
    floor = torch.maximum(peak + filters.min_p[:, None].log(), kth)
    if not filters.any_top_p:
        return floor
    return torch.maximum(floor, _top_p_threshold(scaled, head, floor, filters))


def _top_p_threshold(scaled: Tensor, head: Tensor, floor: Tensor, filters: FilterRows) -> Tensor:
    """The least logit in the nucleus of the tokens that reach ``floor``, [rows, 1] each."""
    peak = head[:, :1]
    weight = (head - peak).exp_().mul_(head >= floor)
    cumulative = weight.cumsum(dim=-1)
    mass = cumulative[:, -1:]  # what the other filters leave: right where that ends within head
    if filters.any_only_top_p:
        total = (scaled.logsumexp(dim=-1, keepdim=True) - peak).exp_()
        mass = torch.where(floor == float("-inf"), total, mass)
    inside = cumulative - weight < filters.top_p[:, None] * mass  # always includes the first token
    count = inside.sum(dim=-1, keepdim=True).clamp_(min=1)  # 0 only where logits are NaN
    threshold = head.gather(1, count - 1)
    off = filters.top_p[:, None] >= 1.0
    if head.shape[1] < scaled.shape[1]:
        off |= (floor > float("-inf")) & (floor <= head[:, -1:])  # mass was not right
    return threshold.masked_fill_(off, float("-inf"))


class FilteredDraw:
    """A draw among the most likely tokens of rows with filters. It is final, except for rows whose
    allowed tokens may go on beyond these: few, and only the device knows which."""

    def __init__(self, logits: Tensor, rows: NoiseRows, filters: FilterRows) -> None:
        """logits: [rows, vocab] fp32."""
        vocab = logits.shape[1]
        self._scaled = logits / rows.temperature[:, None]
        self._rows, self._filters = rows, filters
        # A GPU finds a thousand in about the time of 64, and a second search waits for it.
        counts = TOP_COUNTS if logits.device.type == "cpu" else TOP_COUNTS[1:]
        self._counts = [*(count for count in counts if count < vocab), vocab]
        self.tokens, self.short = _sample_among_top(self._scaled, rows, filters, self._counts)
        """[rows] int64, and [rows] bool: whether the row may allow more tokens; None: no row."""

    def search_further(self, short: list[int]) -> None:
        """Make ``tokens`` final, given the rows that are short."""
        counts = self._counts
        while short:
            rows, counts = upload(short, self.tokens.device), counts[1:]
            self.tokens[rows], again = _sample_among_top(
                self._scaled[rows], self._rows.select(rows), self._filters.select(rows), counts
            )
            if again is None:
                return
            (flags,) = read_back(again)
            short = [row for row, flag in zip(short, flags, strict=True) if flag]


def _sample_among_top(
    scaled: Tensor, rows: NoiseRows, filters: FilterRows, counts: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Draw from the ``counts[0]`` most likely tokens: [rows] int64. Return also which rows may
    allow more tokens than these, [rows] bool; None if these are all."""
    values, ids = scaled.topk(counts[0], dim=-1)  # [rows, counts[0]], greatest first
    threshold = filter_threshold(scaled, values, filters)
    score = gumbel_noise(rows.keys, rows.positions, ids)
    score.add_(values).masked_fill_(values < threshold, float("-inf"))
    tokens = ids.gather(1, score.max(dim=-1, keepdim=True).indices)[:, 0]
    if len(counts) == 1:
        return tokens, None
    # If the last of the head is at -inf, every token beyond it is, too.
    last = values[:, -1:]
    return tokens, ((threshold <= last) & (last > float("-inf")))[:, 0]


def _as_int64(value: int) -> int:
    """Return ``value`` mod 2**64 in the two's complement of torch's int64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _as_int64(0x9E3779B97F4A7C15)
_CPU_TILE = 1 << 16
"""Elements that are mixed at a time on a CPU: some fifty passes over them stay in its cache."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, into a new tensor."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shift(x, 31))


def noise_key(seed: int, choice: int) -> int:
    """Return the int64 key of one choice of one request; computed once, when it gets its row."""
    key = torch.tensor([_as_int64(seed)]) + _GAMMA
    return int(_mix_(_mix_(key) ^ _as_int64(choice * 0xD1B54A32D192ED03)))


def gumbel_noise(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Compute Gumbel(0, 1) noise of ``tokens``: [rows, k] float64.

    keys, positions: [rows] int64; a position is the index of the token to draw in its sequence.
    tokens: [rows, k] int64, or [k] for all rows alike.
    """
    row = _mix_(keys ^ (positions * _MIX1))
    bits = _shift(_mix_(row[:, None] + (tokens + 1) * _GAMMA), 11)  # 53 random bits
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class NoiseRows:
    """Inputs of a row's draw beside its logits, one element per row: [rows]."""

    temperature: Tensor  # [rows] float32
    keys: Tensor  # [rows] int64, of ``noise_key``
    positions: Tensor  # [rows] int64, index of the token to draw

    def select(self, rows: Tensor) -> NoiseRows:
        """Return the inputs of ``rows`` [S] int64 only: [S]."""
        return NoiseRows(self.temperature[rows], self.keys[rows], self.positions[rows])


def sample_unfiltered(logits: Tensor, rows: NoiseRows) -> Tensor:
    """Draw a token [rows] int64 per row of logits [rows, vocab] fp32; every token is allowed."""
    vocab = logits.shape[1]
    width = max(1, _CPU_TILE // len(logits)) if logits.device.type == "cpu" else vocab
    token_ids = torch.arange(vocab, device=logits.device)
    scores, tokens = [], []
    for start in range(0, vocab, width):
        tile = slice(start, start + width)
        scaled = logits[:, tile] / rows.temperature[:, None]
        noise = gumbel_noise(rows.keys, rows.positions, token_ids[tile])
        best = noise.add_(scaled).max(dim=-1)
        scores.append(best.values)
        tokens.append(best.indices.add_(start))
    if len(tokens) == 1:
        return tokens[0]
    winner = torch.stack(scores, 1).max(dim=-1, keepdim=True).indices  # [rows, 1]
    return torch.stack(tokens, 1).gather(1, winner)[:, 0]


_MIX1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX2 = _as_int64(0x94D049BB133111EB)
