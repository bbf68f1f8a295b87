"""Which rows of a step's logits are greedy, filtered, penalized, biased, limited or reported.

This follows from the requests alone. ``Sampler`` computes it once and keeps it while the same rows
draw, so that a step needs no Python per row. The name is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.sampling.filters import FilterRows, NoiseRows
from engine.sampling.logprobs import LogprobRows
from engine.sampling.penalties import (
    AllowedTokenRows,
    BannedTokenRows,
    IntArray,
    LogitBiasRows,
    PenaltyRows,
)
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence as Running
from engine.uploads import upload
from protocol.sampling_params import SamplingParams

Rows = TypeVar("Rows", LogitBiasRows, AllowedTokenRows, BannedTokenRows, PenaltyRows)

_SMALLEST = torch.finfo(torch.float32).tiny
"""A ``min_p`` below it may be 0 in the table."""


@dataclass(frozen=True)
class DraftRows:
    """The rows of a verification, packed by sequence: the row of its last token, then the rows of
    its draft tokens."""

    owner: Tensor  # [R] int64, index into ``drawing`` of each row
    counts: IntArray  # [B] rows of each sequence, on the host
    depth: Tensor  # [R] int64, 0 for the row of the last token
    ancestors: Tensor  # [R, D] int64, draft tokens from the root down to the row, padded with -1


@dataclass(frozen=True)
class RandomRows:
    """Rows of the logits that are sampled with noise: all with filters, or all without."""

    at: Tensor | None  # [S] int64, rows of the logits; None: all of them
    places: IntArray  # [S] the same, on the host
    temperature: Tensor  # [S] float32
    keys: Tensor  # [S] int64, of ``noise_key``
    filters: FilterRows | None

    def noise(self, positions: Tensor) -> NoiseRows:
        """Return the noise inputs [S]; positions: [R] int64, the index of the token to draw for
        every row of the logits."""
        own = positions if self.at is None else positions[self.at]
        return NoiseRows(self.temperature, self.keys, own)

    def expand(self, nodes: DraftRows) -> RandomRows:
        """Return these rows for ``SamplingMetadata.expand``."""
        at, places, index = _rows_of_owners(self.places, nodes)
        filters = None if self.filters is None else self.filters.select(index)
        return RandomRows(
            at=None if self.at is None else at,
            places=places,
            temperature=self.temperature[index],
            keys=self.keys[index],
            filters=filters,
        )


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows of the logits by what a step does for them; None: for no row."""

    rows: int
    any_greedy: bool
    random: tuple[RandomRows, ...]  # the rows without filters, the rows with filters
    bias: LogitBiasRows | None
    allowed: AllowedTokenRows | None
    bans: BannedTokenRows | None
    penalties: PenaltyRows | None
    logprobs: LogprobRows | None

    def expand(self, nodes: DraftRows) -> SamplingMetadata:
        """Return the metadata of a verification, where a sequence has several rows. Only operations
        on arrays, so that a row costs no Python, and none that waits for the device."""
        return SamplingMetadata(
            rows=len(nodes.owner),
            any_greedy=self.any_greedy,
            random=tuple(rows.expand(nodes) for rows in self.random),
            bias=_expand(self.bias, nodes),
            allowed=_expand(self.allowed, nodes),
            bans=_expand(self.bans, nodes),
            penalties=_expand(self.penalties, nodes),
            logprobs=_expand_logprobs(self.logprobs, nodes),
        )


def _rows_of_owners(places: IntArray, nodes: DraftRows) -> tuple[Tensor, IntArray, Tensor]:
    """Rows whose owners are at ``places`` [S], which ascend: their places in the logits [S'] int64,
    the same on the host, and their owners' indexes into ``places`` [S'] int64."""
    device = nodes.owner.device
    if len(places) == len(nodes.counts):
        every = np.arange(len(nodes.owner))
        return torch.arange(len(every), device=device), every, nodes.owner
    chosen = np.zeros(len(nodes.counts), dtype=np.bool_)
    chosen[places] = True
    rows = np.repeat(chosen, nodes.counts).nonzero()[0]
    index = np.repeat(np.arange(len(places)), nodes.counts[places])
    return upload(rows, device), rows, upload(index, device)


def _expand(rows: Rows | None, nodes: DraftRows) -> Rows | None:
    """The same for rows of which every other field is a tensor [S, ...]."""
    if rows is None:
        return None
    at, places, index = _rows_of_owners(rows.places, nodes)
    others = [field.name for field in fields(rows) if field.name not in ("at", "places")]
    tensors = {name: getattr(rows, name)[index] for name in others}
    return replace(rows, **tensors | {"at": at, "places": places})


def _expand_logprobs(rows: LogprobRows | None, nodes: DraftRows) -> LogprobRows | None:
    if rows is None:
        return None
    at, places, _ = _rows_of_owners(rows.places, nodes)
    owners = np.repeat(np.arange(len(rows.top)), nodes.counts[rows.places]).tolist()
    top, tokens = tuple(rows.top[i] for i in owners), tuple(rows.tokens[i] for i in owners)
    return LogprobRows(at, places, top, tokens)


def build_sampling_metadata(
    drawing: Sequence[Running], rows: Tensor, table: SamplingTable
) -> SamplingMetadata:
    """Return the metadata of ``drawing``, which draw from the logits' rows in this order.

    rows: [R] int64, their rows in ``table``.
    """
    params = [s.request.sampling for s in drawing]

    def _find(tests: Iterable[object]) -> IntArray | None:
        found = [i for i, test in enumerate(tests) if test]
        return np.array(found) if found else None

    plain = _find(not p.is_greedy and not p.has_filters for p in params)
    filtered = _find(not p.is_greedy and p.has_filters for p in params)
    biased = _find(p.logit_bias for p in params)
    limited = _find(p.allowed_token_ids for p in params)
    banned = _find(
        _is_below_min_tokens(s) and table.end_tokens(s.request.sampling) for s in drawing
    )
    penalized = _find(p.has_penalties for p in params)
    reported = _find(p.logprobs is not None for p in params)
    widest = max(len(p.logit_bias) for p in params)
    random = [] if plain is None else [_random(plain, rows, table)]
    if filtered is not None:
        random.append(_random(filtered, rows, table, [params[i] for i in filtered]))
    return SamplingMetadata(
        rows=len(params),
        any_greedy=any(p.is_greedy for p in params),
        random=tuple(random),
        bias=None if biased is None else _bias(biased, rows, table, widest),
        allowed=None if limited is None else _allowed(limited, rows, table),
        bans=None if banned is None else _bans(banned, rows, table),
        penalties=None if penalized is None else _penalties(penalized, rows, table),
        logprobs=None if reported is None else _logprobs(reported, params, rows.device),
    )


def _is_below_min_tokens(sequence: Running) -> bool:
    request = sequence.request
    return len(sequence.tokens) < len(request.prompt) + request.sampling.min_tokens


def _random(
    places: IntArray, rows: Tensor, table: SamplingTable, filtered: Sequence[SamplingParams] = ()
) -> RandomRows:
    """``filtered``: the parameters of the rows, if they have filters."""
    at = upload(places, rows.device)
    own = rows[at]
    filters = None
    if filtered:
        top_p, top_k, min_p = (table.column(name, own) for name in ("top_p", "top_k", "min_p"))
        has_top_p = [p for p in filtered if p.top_p < 1.0]
        only_top_p = any(
            (not p.top_k or p.top_k >= table.vocab) and p.min_p < _SMALLEST for p in has_top_p
        )
        filters = FilterRows(top_p, top_k, min_p, bool(has_top_p), only_top_p)
    return RandomRows(
        at=None if len(at) == len(rows) else at,
        places=places,
        temperature=table.column("temperature", own),
        keys=table.column("noise_key", own),
        filters=filters,
    )


def _bias(places: IntArray, rows: Tensor, table: SamplingTable, widest: int) -> LogitBiasRows:
    assert table.bias is not None
    at = upload(places, rows.device)
    tokens, values = (column[rows[at], :widest] for column in table.bias)
    return LogitBiasRows(at, places, tokens, values)


def _allowed(places: IntArray, rows: Tensor, table: SamplingTable) -> AllowedTokenRows:
    assert table.forbidden is not None
    at = upload(places, rows.device)
    ends = upload(table.eos, rows.device).expand(len(places), -1)
    return AllowedTokenRows(at, places, table.forbidden[rows[at]], ends)


def _bans(places: IntArray, rows: Tensor, table: SamplingTable) -> BannedTokenRows:
    assert table.ends is not None
    at = upload(places, rows.device)
    lengths = table.column("min_length", rows[at])
    return BannedTokenRows(at, places, table.ends[rows[at]], lengths)


def _penalties(places: IntArray, rows: Tensor, table: SamplingTable) -> PenaltyRows:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    at = upload(places, rows.device)
    own = rows[at]
    return PenaltyRows(at, places, own, *(table.column(name, own) for name in names))


def _logprobs(
    places: IntArray, params: Sequence[SamplingParams], device: torch.device
) -> LogprobRows:
    top = tuple(params[i].logprobs or 0 for i in places)
    tokens = tuple(params[i].logprob_token_ids for i in places)
    return LogprobRows(upload(places, device), places, top, tokens)
