"""Log-probabilities of the model's own logits, for the rows whose requests want them.

They are computed from the logits before bias, penalties, temperature and filters (vLLM's default),
so they describe the model and not the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.penalties import IntArray
from engine.scheduling.sequence import Sequence
from engine.uploads import read_back, upload
from protocol.requests import Logprobs
from protocol.sampling_params import MAX_LOGPROBS

PROMPT_CHUNK = 64
"""Prompt positions whose logits exist at a time: 32 MiB with a vocabulary of 128k."""


@dataclass(frozen=True)
class LogprobRows:
    """Rows of the logits whose requests want log-probabilities."""

    at: Tensor  # [S] int64, rows of the logits
    places: IntArray  # [S] the same, on the host
    top: tuple[int, ...]  # [S] number of most likely tokens that each wants
    tokens: tuple[tuple[int, ...], ...]  # [S] tokens that each wants instead of these; (): none


@dataclass(frozen=True)
class LogprobInputs:
    """What is kept of a step's logits until its tokens are drawn."""

    rows: LogprobRows
    logits: Tensor  # [S, vocab] as the model computed them
    total: Tensor  # [S] their logsumexp
    values: Tensor  # [S, n] greatest logits, greatest first
    tokens: Tensor  # [S, n] int64, the tokens of ``values``


def gather_logprob_inputs(logits: Tensor, rows: LogprobRows) -> LogprobInputs:
    """Copy what ``compute_logprobs`` needs from logits [R, vocab] fp32, before they change."""
    own = logits[rows.at]
    # The few rows with tokens of their own, or with more than MAX_LOGPROBS, are looked at later.
    # The count is always the same: how ties are sorted depends on it, and a row's result must not
    # depend on other rows.
    count = min(MAX_LOGPROBS, own.shape[1]) if any(rows.top) else 0
    values, tokens = own.topk(count, dim=-1)
    return LogprobInputs(rows, own, own.logsumexp(dim=-1), values, tokens)


def compute_logprobs(inputs: LogprobInputs, drawn: Tensor) -> list[Logprobs]:
    """Return the log-probabilities of the rows in ``inputs``. drawn: [R] int64, of all rows."""
    chosen = inputs.logits.gather(1, drawn[inputs.rows.at][:, None])  # [S, 1]
    rank = (inputs.logits > chosen).sum(dim=-1) + 1
    total = inputs.total[:, None]
    host = read_back((chosen - total)[:, 0], rank, inputs.tokens, inputs.values - total)
    columns = zip(*host, inputs.rows.top, strict=True)
    out = [Logprobs(own, place, ids[:n], top[:n]) for own, place, ids, top, n in columns]
    if any(inputs.rows.tokens):
        _set_wanted_tokens(out, inputs, drawn)
    for place, count in enumerate(inputs.rows.top):
        if count > MAX_LOGPROBS and not inputs.rows.tokens[place]:
            _set_many_tokens(out, inputs, place, count)
    return out


def _set_wanted_tokens(out: list[Logprobs], inputs: LogprobInputs, drawn: Tensor) -> None:
    """Report the tokens that some rows want, with the drawn one before them if it is another."""
    rows = inputs.rows
    places = [place for place, tokens in enumerate(rows.tokens) if tokens]
    width = max(len(rows.tokens[place]) for place in places)
    padded = [rows.tokens[p] + (0,) * (width - len(rows.tokens[p])) for p in places]
    at, tokens = upload(places, drawn.device), upload(np.array(padded), drawn.device)
    values = inputs.logits[at].gather(1, tokens) - inputs.total[at][:, None]  # [wanting, width]
    found, own = read_back(values, drawn[rows.at][at])
    for place, token, row in zip(places, own, found, strict=True):
        wanted, report = rows.tokens[place], out[place]
        before = [] if token in wanted else [token]
        out[place] = Logprobs(
            *(report.logprob, report.rank, [*before, *wanted]),
            [report.logprob] * len(before) + row[: len(wanted)],
        )


def _set_many_tokens(out: list[Logprobs], inputs: LogprobInputs, place: int, count: int) -> None:
    """Report the ``count`` most likely tokens of one row; the lowest id first among equal ones."""
    values, tokens = inputs.logits[place].sort(descending=True, stable=True)
    top, ids = read_back(values[:count] - inputs.total[place], tokens[:count])
    out[place] = Logprobs(out[place].logprob, out[place].rank, ids, top)


def add_prompt_logprobs(
    sequence: Sequence, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> None:
    """Append the log-probabilities of a chunk's prompt tokens to ``sequence.prompt_logprobs``.

    hidden: [n, hidden] of the tokens after the ``computed`` ones; the one at position p predicts
    the token at p + 1. A preempted sequence has the log-probabilities of its first tokens already.
    """
    prompt, known = sequence.request.prompt, len(sequence.prompt_logprobs)
    assert sequence.computed <= known, "all of the prompt is computed here"
    end = min(sequence.computed + len(hidden), len(prompt) - 1)
    top = sequence.request.sampling.prompt_logprobs or 0
    for start in range(known, end, PROMPT_CHUNK):
        stop = min(end, start + PROMPT_CHUNK)
        chunk = hidden[start - sequence.computed : stop - sequence.computed]
        rows = torch.arange(stop - start, device=hidden.device)
        wanted = LogprobRows(rows, np.arange(stop - start), (top,) * len(rows), ((),) * len(rows))
        actual = upload(prompt[start + 1 : stop + 1], hidden.device)
        inputs = gather_logprob_inputs(compute_logits(chunk), wanted)
        sequence.prompt_logprobs += compute_logprobs(inputs, actual)
