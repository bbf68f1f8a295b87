"""Log-probabilities of a prompt's own tokens, as its chunks are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.sampling.logprobs import ReportRows, finish, prepare
from engine.sequence import Sequence

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
