"""Log-probabilities for the rows that ask: of the model's own logits, before anything is changed.

They are taken from the logits before bias, penalties, temperature and filters (as vLLM's default
is), so they say what the model thinks, and not how it was asked to draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.scheduling.sequence import Sequence
from protocol.requests import Logprobs
from protocol.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class ReportRows:
    """Rows of the logits that want log-probabilities."""

    at: Tensor  # [S] int64, rows of the logits
    places: tuple[int, ...]  # the same, on the host
    top: tuple[int, ...]  # [S] how many most likely tokens each wants


@dataclass(frozen=True)
class Report:
    """What is kept of a step's logits until its tokens are drawn."""

    rows: ReportRows
    logits: Tensor  # [S, vocab] as the model gave them
    total: Tensor  # [S] logsumexp of these
    values: Tensor  # [S, N] greatest logits, best first
    tokens: Tensor  # [S, N] int64, theirs


def prepare(logits: Tensor, rows: ReportRows) -> Report:
    """Look at logits [R, vocab] fp32 before they are changed in place."""
    own = logits[rows.at]
    # Always as many: how ties are sorted depends on the number, and must not on other rows.
    count = min(MAX_LOGPROBS, own.shape[1]) if any(rows.top) else 0
    values, tokens = own.topk(count, dim=-1)
    return Report(rows, own, own.logsumexp(dim=-1), values, tokens)


def finish(report: Report, drawn: Tensor) -> list[Logprobs]:
    """Log-probabilities of the rows that asked, in their order. drawn: [R] int64, of all rows."""
    chosen = report.logits.gather(1, drawn[report.rows.at][:, None])  # [S, 1]
    rank = (report.logits > chosen).sum(dim=-1) + 1
    total = report.total[:, None]
    columns = zip(
        (chosen - total)[:, 0].tolist(),
        rank.tolist(),
        report.tokens.tolist(),
        (report.values - total).tolist(),
        report.rows.top,
        strict=True,
    )
    return [Logprobs(own, place, ids[:n], top[:n]) for own, place, ids, top, n in columns]


# MERGED engine.sampling.prompt
# Log-probabilities of a prompt's own tokens, as its chunks are computed.

PIECE = 64
"""Positions whose logits are there at a time: 32 MiB of a vocabulary of 128k."""


def score_(sequence: Sequence, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Add what the chunk tells of the prompt to ``sequence.prompt_logprobs``.

    hidden: [n, hidden] of the tokens after the ``computed`` ones; the one at position p tells of
    the token at p + 1. A sequence that was preempted has the first ones already.
    """
    prompt, known = sequence.request.prompt, len(sequence.prompt_logprobs)
    assert sequence.computed <= known, "all of the prompt is computed here"
    end = min(sequence.computed + len(hidden), len(prompt) - 1)
    top = sequence.request.sampling.prompt_logprobs or 0
    for start in range(known, end, PIECE):
        stop = min(end, start + PIECE)
        piece = hidden[start - sequence.computed : stop - sequence.computed]
        rows = torch.arange(stop - start, device=hidden.device)
        wanted = ReportRows(rows, tuple(range(stop - start)), (top,) * (stop - start))
        actual = torch.tensor(prompt[start + 1 : stop + 1], device=hidden.device)
        sequence.prompt_logprobs += finish(prepare(logits_of(piece), wanted), actual)
