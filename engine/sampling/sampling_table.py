"""The parameters of every running request, one row each, as tensors.

    floats   [rows, 6] float32    temperature, top_p, min_p, repetition, presence, frequency
    ints     [rows, 3] int64      key of the noise, top_k, tokens before which the text may not end
    bias     [rows, 1024]         token ids (int64) and biases (float32), padded with (0, 0.0)
    ends     [rows, ...] int64    tokens that end the text, padded with the first of them
    history  see ``penalties``

The last three are allocated when a request first asks for them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.sampling.noise import row_key
from engine.sampling.penalties import History
from engine.scheduling.sequence import Sequence
from protocol.errors import InvalidRequest
from protocol.requests import Sampling
from protocol.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKENS

TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
KEY, TOP_K, MIN_LENGTH = range(3)


def penalises(s: Sampling) -> bool:
    """Whether the tokens so far change the logits."""
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def check_tokens(s: Sampling, vocab: int) -> None:
    """Raises InvalidRequest for a token id that the model does not have."""
    named = {"stop_token_ids": s.stop_token_ids, "logit_bias": [t for t, _ in s.logit_bias]}
    for field, tokens in named.items():
        if tokens and max(tokens) >= vocab:
            raise InvalidRequest(
                f"{field} has token id {max(tokens)}; the vocabulary ends at {vocab - 1}", field
            )


class SamplingTable:
    """Rows are those of ``RowState``; ``length`` is the most tokens of a sequence."""

    def __init__(
        self, rows: int, length: int, vocab: int, eos: Collection[int], device: torch.device
    ) -> None:
        self.vocab = vocab
        self.device = device
        self.floats = torch.zeros((rows, 6), device=device)
        self.ints = torch.zeros((rows, 3), dtype=torch.int64, device=device)
        self.bias: tuple[Tensor, Tensor] | None = None
        self.ends: Tensor | None = None
        self.history: History | None = None
        self._length = length
        self._eos = tuple(eos)

    def seat(self, sequence: Sequence) -> None:
        """Write the row of a sequence that has just got it."""
        row, s, prompt = sequence.row, sequence.request.sampling, len(sequence.request.prompt)
        floats = (
            *(s.temperature, s.top_p, s.min_p),
            *(s.repetition_penalty, s.presence_penalty, s.frequency_penalty),
        )
        ints = (row_key(s.seed, s.choice), s.top_k or self.vocab, prompt + s.min_tokens)
        self.floats[row] = torch.tensor(floats, device=self.device)
        self.ints[row] = torch.tensor(ints, device=self.device)
        if s.logit_bias:
            self._seat_bias(row, s)
        if s.min_tokens and self.ends_of(s):
            self._seat_ends(row, s)
        if penalises(s):
            if self.history is None:
                rows = len(self.ints)
                self.history = History(rows, self._length, self.vocab, self.device)
            self.history.seat(row, sequence.tokens, prompt)

    def ends_of(self, s: Sampling) -> tuple[int, ...]:
        """Tokens that end the text of a request: engine/execution/stepper.py."""
        ignored = s.ignore_eos and not s.grammar
        return s.stop_token_ids if ignored else (*self._eos, *s.stop_token_ids)

    def _seat_bias(self, row: int, s: Sampling) -> None:
        if self.bias is None:
            tokens = torch.zeros(
                (len(self.ints), MAX_LOGIT_BIAS), dtype=torch.int64, device=self.device
            )
            self.bias = (tokens, torch.zeros_like(tokens, dtype=torch.float32))
        tokens, values = self.bias
        tokens[row], values[row] = 0, 0.0
        count = len(s.logit_bias)
        tokens[row, :count] = torch.tensor([t for t, _ in s.logit_bias], device=self.device)
        values[row, :count] = torch.tensor([b for _, b in s.logit_bias], device=self.device)

    def _seat_ends(self, row: int, s: Sampling) -> None:
        if self.ends is None:
            width = MAX_STOP_TOKENS + len(self._eos)
            self.ends = torch.zeros((len(self.ints), width), dtype=torch.int64, device=self.device)
        ends = torch.tensor(self.ends_of(s), device=self.device)
        self.ends[row] = ends[0]
        self.ends[row, : len(ends)] = ends
