"""A step's tokens from its logits.

    report -> bias -> penalties -> grammar -> ban -> greedy: argmax
                                                  -> / temperature -> filters -> + noise: argmax

The order is vLLM's, but for grammar and ban: a ban leaves a token to draw where a grammar allows
only what is banned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.grammar.masks import Barred, forbid_
from engine.sampling.bias import add_bias_, ban_
from engine.sampling.draft_rows import DraftRows
from engine.sampling.filters import draw_filtered
from engine.sampling.logprobs import finish, prepare
from engine.sampling.noise import draw_all
from engine.sampling.penalties import History
from engine.sampling.selection import Draws, Selection, select
from engine.sampling.spread import spread
from engine.sampling.table import SamplingTable, penalises
from engine.sequence import Sequence as Running
from protocol.logprobs import Logprobs


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
