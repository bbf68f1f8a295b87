"""A step's tokens from its logits.

    report -> bias -> penalties -> grammar -> ban -> greedy: argmax
                                                  -> / temperature -> filters -> + noise: argmax

The order is vLLM's, but for grammar and ban: a ban leaves a token to draw where a grammar allows
only what is banned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.filters import draw_filtered
from engine.sampling.logprobs import ReportRows, finish, prepare
from engine.sampling.noise import draw_all
from engine.sampling.penalties import BanRows, BiasRows, History, PenaltyRows, add_bias_, ban_
from engine.sampling.sampling_table import SamplingTable, penalises
from engine.sampling.selection import Draws, Selection, select
from engine.scheduling.sequence import Sequence as Running
from engine.structured_output.masks import Barred, forbid_
from protocol.requests import Logprobs

# MERGED engine.sampling.draft_rows
# The rows of a step that verifies drafts: several of a sequence, each after drafts of its own.


@dataclass(frozen=True)
class DraftRows:
    """The rows of a verification, packed by sequence: the row of its last token, then its nodes."""

    owner: Tensor  # [R] int64, index into ``drawing`` of each row
    depth: Tensor  # [R] int64, 0 for the row of the last token
    ancestors: Tensor  # [R, D] int64, draft tokens from the root down to the row, padded with -1


# MERGED engine.sampling.spread
# From what is to be done for sequences to what is to be done for their rows, where a sequence has
# several: tensor operations only, so that a row costs no Python.


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


def process_(
    logits: Tensor,
    chosen: Selection,
    positions: Tensor,
    history: History | None,
    longest: int,
    barred: Barred | None = None,
    ancestors: Tensor | None = None,
) -> None:
    """Bias, penalties, grammars and bans, in place on logits [R, vocab] fp32, contiguous.

    positions: [R] int64, the index of the token to draw; no sequence that is penalised has more
    tokens than ``longest``. ``barred``: what the grammars of some rows do not allow. ancestors:
    [R, D] int64, drafts that a row comes after, padded with -1; None: none.
    """
    if chosen.bias is not None:
        add_bias_(logits, chosen.bias)
    if chosen.penalties is not None:
        assert history is not None
        history.penalise_(logits, chosen.penalties, longest, ancestors)
    if barred is not None:
        forbid_(logits, barred)
    if chosen.bans is not None:
        ban_(logits, chosen.bans, positions, sparing=barred is not None)


def draw(logits: Tensor, chosen: Selection, positions: Tensor) -> Tensor:
    """Tokens [R] int64 from processed logits [R, vocab] fp32: a function of each row alone.

    positions: [R] int64, the index of the token to draw.
    """
    # On the CPU, max takes a third of argmax's time.
    tokens = logits.max(dim=-1).indices if chosen.greedy else torch.empty_like(positions)
    for draws in chosen.draws:
        drawn = _draw(logits if draws.at is None else logits[draws.at], draws, positions)
        if draws.at is None:
            return drawn
        tokens[draws.at] = drawn
    return tokens


def _draw(logits: Tensor, draws: Draws, positions: Tensor) -> Tensor:
    if draws.filters is None:
        return draw_all(logits, draws.noise(positions))
    return draw_filtered(logits, draws.noise(positions), draws.filters)


class Drawer:
    """Draws for the rows of one table; keeps what it has worked out while the same rows draw."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._drawing: list[Running] = []
        self._seats: list[int] = []
        self._rows: Tensor | None = None
        self._chosen: Selection | None = None
        self._penalised: list[Running] = []  # of those drawing

    def __call__(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        barred: Barred | None = None,
    ) -> tuple[Tensor, list[Logprobs | None]]:
        """One token for each of ``drawing``: [R] int64, and the log-probabilities asked for.

        logits: [R, vocab] fp32, changed here. rows: [R] int64, rows of the table. positions: [R]
        int64, the index of the token to draw.
        """
        chosen = self._select(drawing, rows)
        drawn = self._drawn(chosen, logits, positions, barred)
        if chosen.penalties is not None and self._table.history is not None:
            self._table.history.append(chosen.penalties, positions, drawn[0])
        return drawn

    def verify(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        nodes: DraftRows,
        barred: Barred | None = None,
    ) -> tuple[Tensor, list[Logprobs | None]]:
        """What each of ``drawing`` would draw after its tokens and after drafts: [R] int64, and the
        log-probabilities asked for. Which of these its text takes is for ``append``.

        logits: [R, vocab] fp32, changed here. rows: [B] int64, rows of the table. positions: [R]
        int64, the index of the token that a row draws.
        """
        chosen = spread(self._select(drawing, rows), nodes.owner)
        return self._drawn(chosen, logits, positions, barred, nodes.ancestors)

    def append(
        self,
        drawing: list[Running],
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        counts: Tensor,
    ) -> None:
        """After ``verify``: the texts of ``drawing`` have got tokens [B, D] int64, counts [B] int64
        of them each, at least one, and then the last one again. rows: [B] int64, rows of the table.
        positions: [B] int64, of the first one."""
        chosen = self._select(drawing, rows)
        if chosen.penalties is not None and self._table.history is not None:
            self._table.history.extend(chosen.penalties, positions, tokens, counts)

    def _drawn(
        self,
        chosen: Selection,
        logits: Tensor,
        positions: Tensor,
        barred: Barred | None,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, list[Logprobs | None]]:
        report = None if chosen.reports is None else prepare(logits, chosen.reports)
        longest = max((len(s.tokens) for s in self._penalised), default=0)
        process_(logits, chosen, positions, self._table.history, longest, barred, ancestors)
        tokens = draw(logits, chosen, positions)
        return tokens, [] if report is None else _in_place(chosen, finish(report, tokens))

    def _select(self, drawing: list[Running], rows: Tensor) -> Selection:
        """What to do for these rows. Sequences compare by identity, so this costs no Python for
        each while nothing changes."""
        if self._chosen is not None and drawing == self._drawing:
            if rows is self._rows:
                return self._chosen
            if [s.row for s in drawing] == self._seats:
                self._rows = rows
                return self._chosen
        self._drawing, self._rows = drawing, rows
        self._seats = [s.row for s in drawing]
        self._penalised = [s for s in drawing if penalises(s.request.sampling)]
        self._chosen = select(drawing, rows, self._table)
        return self._chosen


def _in_place(chosen: Selection, reports: Sequence[Logprobs]) -> list[Logprobs | None]:
    """Reports in the place of their rows."""
    assert chosen.reports is not None
    out: list[Logprobs | None] = [None] * chosen.rows
    for at, report in zip(chosen.reports.places, reports, strict=True):
        out[at] = report
    return out
