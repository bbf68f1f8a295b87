"""From what is to be done for sequences to what is to be done for their rows, where a sequence has
several: tensor operations only, so that a row costs no Python."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling.bias import BanRows, BiasRows
from engine.sampling.logprobs import ReportRows
from engine.sampling.penalties import PenaltyRows
from engine.sampling.selection import Draws, Selection


def spread(chosen: Selection, owner: Tensor) -> Selection:
    """``chosen``, with its sequences' rows in place of the sequences.

    owner: [R] int64, index of each row's sequence among those of ``chosen``.
    """
    count = chosen.rows
    return Selection(
        rows=len(owner),
        greedy=chosen.greedy,
        draws=tuple(_draws(draws, count, owner) for draws in chosen.draws),
        bias=None if chosen.bias is None else _bias(chosen.bias, count, owner),
        bans=None if chosen.bans is None else _bans(chosen.bans, count, owner),
        penalties=None if chosen.penalties is None else _penalties(chosen.penalties, count, owner),
        reports=None if chosen.reports is None else _reports(chosen.reports, count, owner),
    )


def _of(at: Tensor, count: int, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose owners are in ``at`` [S], of ``count`` sequences: their places in the logits and
    their owners' in ``at``, both [S'] int64."""
    if len(at) == count:
        return torch.arange(len(owner), device=owner.device), owner
    place = torch.full((count,), -1, device=owner.device)
    place[at] = torch.arange(len(at), device=owner.device)
    places = place[owner]
    rows = (places >= 0).nonzero()[:, 0]
    return rows, places[rows]


def _draws(draws: Draws, count: int, owner: Tensor) -> Draws:
    rows, own = (None, owner) if draws.at is None else _of(draws.at, count, owner)
    filters = None if draws.filters is None else draws.filters.of(own)
    return Draws(rows, draws.temperature[own], draws.keys[own], filters)


def _bias(bias: BiasRows, count: int, owner: Tensor) -> BiasRows:
    rows, own = _of(bias.at, count, owner)
    return BiasRows(rows, bias.tokens[own], bias.bias[own])


def _bans(bans: BanRows, count: int, owner: Tensor) -> BanRows:
    rows, own = _of(bans.at, count, owner)
    return BanRows(rows, bans.tokens[own], bans.until[own])


def _penalties(rows: PenaltyRows, count: int, owner: Tensor) -> PenaltyRows:
    at, own = _of(rows.at, count, owner)
    return PenaltyRows(
        at, rows.seats[own], rows.repetition[own], rows.presence[own], rows.frequency[own]
    )


def _reports(reports: ReportRows, count: int, owner: Tensor) -> ReportRows:
    at, own = _of(reports.at, count, owner)
    return ReportRows(at, tuple(at.tolist()), tuple(reports.top[i] for i in own.tolist()))
