"""What is to be done for the rows that draw a token, worked out once while they stay the same.

Which rows are greedy, filtered, penalised, biased or reported follows from their requests. Each of
these gets the rows it is for, and their parameters; a step then needs no Python for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling import sampling_table as columns
from engine.sampling.filters import FilterRows
from engine.sampling.logprobs import ReportRows
from engine.sampling.noise import NoiseRows
from engine.sampling.penalties import BanRows, BiasRows, PenaltyRows
from engine.sampling.sampling_table import SamplingTable, penalises
from engine.scheduling.sequence import Sequence as Running
from protocol.requests import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow fp32."""


@dataclass(frozen=True)
class Draws:
    """Rows of the logits that are drawn with noise, in one of two ways."""

    at: Tensor | None  # [S] int64, rows of the logits; None: all of them
    temperature: Tensor  # [S] float32
    keys: Tensor  # [S] int64
    filters: FilterRows | None

    def noise(self, positions: Tensor) -> NoiseRows:
        """positions: [R] int64, the index of the token to draw, for all rows of the logits."""
        own = positions if self.at is None else positions[self.at]
        return NoiseRows(self.temperature, self.keys, own)


@dataclass(frozen=True)
class Selection:
    """Rows of the logits by what is to be done for them; None: for no row."""

    rows: int
    greedy: bool  # whether any row is
    draws: tuple[Draws, ...]  # those without filters, those with
    bias: BiasRows | None
    bans: BanRows | None
    penalties: PenaltyRows | None
    reports: ReportRows | None


def filtered_by(s: Sampling) -> bool:
    """Whether some tokens may not be drawn."""
    return s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0


def select(drawing: Sequence[Running], rows: Tensor, table: SamplingTable) -> Selection:
    """What to do for ``drawing``, which draw from the logits' rows in this order.

    rows: [R] int64, their rows in ``table``.
    """
    wanted = [s.request.sampling for s in drawing]
    noisy = [s.temperature >= GREEDY_BELOW for s in wanted]

    def find(test: Callable[[int], object]) -> Tensor | None:
        found = [i for i in range(len(wanted)) if test(i)]
        return torch.tensor(found, device=rows.device) if found else None

    def early(i: int) -> object:
        left = len(drawing[i].request.prompt) + wanted[i].min_tokens - len(drawing[i].tokens)
        return left > 0 and table.ends_of(wanted[i])

    plain = find(lambda i: noisy[i] and not filtered_by(wanted[i]))
    filtered = find(lambda i: noisy[i] and filtered_by(wanted[i]))
    biased = find(lambda i: wanted[i].logit_bias)
    banned = find(early)
    punished = find(lambda i: penalises(wanted[i]))
    widest = max(len(s.logit_bias) for s in wanted)
    return Selection(
        rows=len(wanted),
        greedy=not all(noisy),
        draws=(
            *(() if plain is None else (_draws(plain, rows, table),)),
            *(() if filtered is None else (_filtered(filtered, rows, table),)),
        ),
        bias=None if biased is None else _bias(biased, rows, table, widest),
        bans=None if banned is None else _bans(banned, rows, table),
        penalties=None if punished is None else _penalties(punished, rows, table),
        reports=_reports(wanted, rows.device),
    )


def _draws(
    at: Tensor, rows: Tensor, table: SamplingTable, chosen: FilterRows | None = None
) -> Draws:
    seats = rows[at]
    return Draws(
        at=None if len(at) == len(rows) else at,
        temperature=table.floats[seats, columns.TEMPERATURE],
        keys=table.ints[seats, columns.KEY],
        filters=chosen,
    )


def _filtered(at: Tensor, rows: Tensor, table: SamplingTable) -> Draws:
    seats = rows[at]
    chosen = FilterRows.of_rows(
        top_p=table.floats[seats, columns.TOP_P],
        top_k=table.ints[seats, columns.TOP_K],
        min_p=table.floats[seats, columns.MIN_P],
        vocab=table.vocab,
    )
    return _draws(at, rows, table, chosen)


def _bias(at: Tensor, rows: Tensor, table: SamplingTable, widest: int) -> BiasRows:
    assert table.bias is not None
    tokens, values = (column[rows[at], :widest] for column in table.bias)
    return BiasRows(at, tokens, values)


def _bans(at: Tensor, rows: Tensor, table: SamplingTable) -> BanRows:
    assert table.ends is not None
    return BanRows(at, table.ends[rows[at]], table.ints[rows[at], columns.MIN_LENGTH])


def _reports(wanted: Sequence[Sampling], device: torch.device) -> ReportRows | None:
    asked = [(i, s.logprobs) for i, s in enumerate(wanted) if s.logprobs is not None]
    if not asked:
        return None
    places, top = zip(*asked, strict=True)
    return ReportRows(torch.tensor(places, device=device), places, top)


def _penalties(at: Tensor, rows: Tensor, table: SamplingTable) -> PenaltyRows:
    seats = rows[at]
    return PenaltyRows(
        at=at,
        seats=seats,
        repetition=table.floats[seats, columns.REPETITION],
        presence=table.floats[seats, columns.PRESENCE],
        frequency=table.floats[seats, columns.FREQUENCY],
    )
