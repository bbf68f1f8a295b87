"""Which rows of a step's logits are greedy, filtered, penalized, biased, banned or reported.

This follows from the requests alone. ``Sampler`` computes it once and keeps it while the same rows
draw, so that a step needs no Python per row. The name is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.sampling.filters import FilterRows, NoiseRows
from engine.sampling.logprobs import LogprobRows
from engine.sampling.penalties import BannedTokenRows, LogitBiasRows, PenaltyRows
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence as Running
from protocol.sampling_params import SamplingParams

Rows = TypeVar("Rows", LogitBiasRows, BannedTokenRows, PenaltyRows)


@dataclass(frozen=True)
class RandomRows:
    """Rows of the logits that are sampled with noise: all with filters, or all without."""

    at: Tensor | None  # [S] int64, rows of the logits; None: all of them
    temperature: Tensor  # [S] float32
    keys: Tensor  # [S] int64, of ``noise_key``
    filters: FilterRows | None

    def noise(self, positions: Tensor) -> NoiseRows:
        """Return the noise inputs [S]; positions: [R] int64, the index of the token to draw for
        every row of the logits."""
        own = positions if self.at is None else positions[self.at]
        return NoiseRows(self.temperature, self.keys, own)

    def expand(self, count: int, owner: Tensor) -> RandomRows:
        """Return these rows for ``SamplingMetadata.expand``; owner: [R] int64."""
        at, index = (None, owner) if self.at is None else _rows_of_owners(self.at, count, owner)
        filters = None if self.filters is None else self.filters.select(index)
        return RandomRows(at, self.temperature[index], self.keys[index], filters)


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows of the logits by what a step does for them; None: for no row."""

    rows: int
    any_greedy: bool
    random: tuple[RandomRows, ...]  # the rows without filters, the rows with filters
    bias: LogitBiasRows | None
    bans: BannedTokenRows | None
    penalties: PenaltyRows | None
    logprobs: LogprobRows | None

    def expand(self, owner: Tensor) -> SamplingMetadata:
        """Return the metadata of a verification, where a sequence has several rows. Only tensor
        operations, so that a row costs no Python.

        owner: [R] int64, index of each row's sequence among those of this metadata.
        """
        count = self.rows
        return SamplingMetadata(
            rows=len(owner),
            any_greedy=self.any_greedy,
            random=tuple(rows.expand(count, owner) for rows in self.random),
            bias=_expand(self.bias, count, owner),
            bans=_expand(self.bans, count, owner),
            penalties=_expand(self.penalties, count, owner),
            logprobs=_expand_logprobs(self.logprobs, count, owner),
        )


def _rows_of_owners(at: Tensor, count: int, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose owners are in ``at`` [S], of ``count`` sequences: their places in the logits and
    their owners' places in ``at``, both [S'] int64."""
    if len(at) == count:
        return torch.arange(len(owner), device=owner.device), owner
    place = torch.full((count,), -1, device=owner.device)
    place[at] = torch.arange(len(at), device=owner.device)
    places = place[owner]
    rows = (places >= 0).nonzero()[:, 0]
    return rows, places[rows]


def _expand(rows: Rows | None, count: int, owner: Tensor) -> Rows | None:
    """The same for rows of which every field is a tensor [S, ...]."""
    if rows is None:
        return None
    at, index = _rows_of_owners(rows.at, count, owner)
    tensors = {field.name: getattr(rows, field.name)[index] for field in fields(rows)}
    return replace(rows, **tensors | {"at": at})


def _expand_logprobs(rows: LogprobRows | None, count: int, owner: Tensor) -> LogprobRows | None:
    if rows is None:
        return None
    at, index = _rows_of_owners(rows.at, count, owner)
    return LogprobRows(at, tuple(at.tolist()), tuple(rows.top[i] for i in index.tolist()))


def build_sampling_metadata(
    drawing: Sequence[Running], rows: Tensor, table: SamplingTable
) -> SamplingMetadata:
    """Return the metadata of ``drawing``, which draw from the logits' rows in this order.

    rows: [R] int64, their rows in ``table``.
    """
    params = [s.request.sampling for s in drawing]

    def _find(tests: Iterable[object]) -> Tensor | None:
        found = [i for i, test in enumerate(tests) if test]
        return torch.tensor(found, device=rows.device) if found else None

    plain = _find(not p.is_greedy and not p.has_filters for p in params)
    filtered = _find(not p.is_greedy and p.has_filters for p in params)
    biased = _find(p.logit_bias for p in params)
    banned = _find(
        _is_below_min_tokens(s) and table.end_tokens(s.request.sampling) for s in drawing
    )
    penalized = _find(p.has_penalties for p in params)
    widest = max(len(p.logit_bias) for p in params)
    random = [] if plain is None else [_random(plain, rows, table)]
    random += [] if filtered is None else [_random(filtered, rows, table, filtered=True)]
    return SamplingMetadata(
        rows=len(params),
        any_greedy=any(p.is_greedy for p in params),
        random=tuple(random),
        bias=None if biased is None else _bias(biased, rows, table, widest),
        bans=None if banned is None else _bans(banned, rows, table),
        penalties=None if penalized is None else _penalties(penalized, rows, table),
        logprobs=_logprobs(params, rows.device),
    )


def _is_below_min_tokens(sequence: Running) -> bool:
    request = sequence.request
    return len(sequence.tokens) < len(request.prompt) + request.sampling.min_tokens


def _random(at: Tensor, rows: Tensor, table: SamplingTable, filtered: bool = False) -> RandomRows:
    own = rows[at]
    filters = None
    if filtered:
        top_p, top_k, min_p = (table.column(name, own) for name in ("top_p", "top_k", "min_p"))
        filters = FilterRows.create(top_p, top_k, min_p, table.vocab)
    return RandomRows(
        at=None if len(at) == len(rows) else at,
        temperature=table.column("temperature", own),
        keys=table.column("noise_key", own),
        filters=filters,
    )


def _bias(at: Tensor, rows: Tensor, table: SamplingTable, widest: int) -> LogitBiasRows:
    assert table.bias is not None
    tokens, values = (column[rows[at], :widest] for column in table.bias)
    return LogitBiasRows(at, tokens, values)


def _bans(at: Tensor, rows: Tensor, table: SamplingTable) -> BannedTokenRows:
    assert table.ends is not None
    return BannedTokenRows(at, table.ends[rows[at]], table.column("min_length", rows[at]))


def _penalties(at: Tensor, rows: Tensor, table: SamplingTable) -> PenaltyRows:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return PenaltyRows(at, rows[at], *(table.column(name, rows[at]) for name in names))


def _logprobs(params: Sequence[SamplingParams], device: torch.device) -> LogprobRows | None:
    wanted = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    if not wanted:
        return None
    places, top = zip(*wanted, strict=True)
    return LogprobRows(torch.tensor(places, device=device), places, top)
