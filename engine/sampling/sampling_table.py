"""The sampling parameters of every running request, one row each, as tensors.

    floats     [rows, len(FLOAT_COLUMNS)] float32   the float fields of ``SamplingParams``; a greedy
                                                    row has the temperature 0
    ints       [rows, len(INT_COLUMNS)] int64       values derived from its integer fields
    bias       [rows, 1024] twice                   token ids (int64) and biases (float32), padded
                                                    with (0, 0.0)
    ends       [rows, 64 + eos tokens] int64        tokens that end the text, padded with the first
    forbidden  [rows, vocab] bool                   tokens that ``allowed_token_ids`` leave out
    history    see ``penalties``

The last four are allocated when a request first needs them. The batcher's row state owns the
table; ``sampling_metadata`` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch
from torch import Tensor

from engine.sampling.filters import noise_key
from engine.sampling.penalties import TokenHistory
from engine.scheduling.sequence import Sequence as Running
from engine.uploads import upload
from protocol.errors import InvalidRequest
from protocol.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, SamplingParams

FLOAT_COLUMNS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if isinstance(field.default, float)
)
INT_COLUMNS = ("noise_key", "top_k", "min_length")
"""``top_k`` is the vocabulary's size where it is off. A text may not end while its sequence has
fewer than ``min_length`` tokens."""


def check_token_ids(params: SamplingParams, vocab: int) -> None:
    """Raise InvalidRequest for a token id that the model does not have."""
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
    }
    for field, tokens in fields.items():
        if tokens and max(tokens) >= vocab:
            raise InvalidRequest(
                f"{field} has token id {max(tokens)}; the vocabulary ends at {vocab - 1}", field
            )


class SamplingTable:
    """Sampling parameters by row. The rows are those of ``RowState``; ``length`` is the greatest
    number of tokens of a sequence, ``eos`` the model's end-of-text tokens."""

    def __init__(
        self, rows: int, length: int, vocab: int, eos: Collection[int], device: torch.device
    ) -> None:
        self.vocab = vocab
        self.device = device
        self.floats = torch.zeros((rows, len(FLOAT_COLUMNS)), device=device)
        self.ints = torch.zeros((rows, len(INT_COLUMNS)), dtype=torch.int64, device=device)
        self.bias: tuple[Tensor, Tensor] | None = None
        self.ends: Tensor | None = None
        self.forbidden: Tensor | None = None
        self.history: TokenHistory | None = None
        self._length = length
        self._eos = tuple(eos)

    def column(self, name: str, rows: Tensor) -> Tensor:
        """Return a copy of a column for ``rows`` [S] int64: [S] float32 for one of FLOAT_COLUMNS,
        [S] int64 for one of INT_COLUMNS."""
        if name in FLOAT_COLUMNS:
            return self.floats[rows, FLOAT_COLUMNS.index(name)]
        return self.ints[rows, INT_COLUMNS.index(name)]

    def set_row(self, sequence: Running) -> None:
        """Write the parameters of a sequence into the row that it has just been given."""
        row, params = sequence.row, sequence.request.sampling
        prompt = len(sequence.request.prompt)
        floats = [getattr(params, name) for name in FLOAT_COLUMNS]
        if params.is_greedy:
            floats[FLOAT_COLUMNS.index("temperature")] = 0.0
        key = noise_key(params.seed, params.choice)
        ints = (key, params.top_k or self.vocab, prompt + params.min_tokens)
        self.floats[row] = self._upload_floats(floats)
        self.ints[row] = upload(ints, self.device)
        if params.logit_bias:
            self._set_bias(row, params)
        if params.min_tokens and self.end_tokens(params):
            self._set_ends(row, params)
        if params.allowed_token_ids:
            self._set_forbidden(row, params)
        if params.has_penalties:
            if self.history is None:
                rows = len(self.ints)
                self.history = TokenHistory(rows, self._length, self.vocab, self.device)
            self.history.set_row(row, sequence.tokens, prompt)

    @property
    def eos(self) -> tuple[int, ...]:
        """The model's end-of-text tokens."""
        return self._eos

    def end_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that end the text of a request, as engine/execution/stepper.py does."""
        ignore_eos = params.ignore_eos and not params.grammar
        return params.stop_token_ids if ignore_eos else (*self._eos, *params.stop_token_ids)

    def _set_bias(self, row: int, params: SamplingParams) -> None:
        if self.bias is None:
            shape = (len(self.ints), MAX_LOGIT_BIAS)
            padding = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.bias = (padding, torch.zeros_like(padding, dtype=torch.float32))
        tokens, biases = zip(*params.logit_bias, strict=True)
        uploaded = upload(tokens, self.device), self._upload_floats(biases)
        for column, values in zip(self.bias, uploaded, strict=True):
            column[row] = 0
            column[row, : len(values)] = values

    def _set_ends(self, row: int, params: SamplingParams) -> None:
        if self.ends is None:
            width = MAX_STOP_TOKENS + len(self._eos)
            self.ends = torch.zeros((len(self.ints), width), dtype=torch.int64, device=self.device)
        ends = upload(self.end_tokens(params), self.device)
        self.ends[row] = ends[0]
        self.ends[row, : len(ends)] = ends

    def _set_forbidden(self, row: int, params: SamplingParams) -> None:
        if self.forbidden is None:
            shape = (len(self.ints), self.vocab)
            self.forbidden = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.forbidden[row] = True
        self.forbidden[row, upload(params.allowed_token_ids, self.device)] = False

    def _upload_floats(self, values: Sequence[float]) -> Tensor:
        """Return ``values`` as float32 on the device, without waiting for it."""
        host = torch.tensor(values)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)
