"""Sampling parameters of a request: the fields, their ranges, and their wire form.

The router builds one ``SamplingParams`` from the request's body. It then travels unchanged: over
the wire to the workers, through the engine's messages, and into the rows of
``engine.sampling.sampling_table``. A new parameter needs a field here and in ``wire.proto``.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, NamedTuple, get_type_hints

import msgspec

from protocol.errors import InvalidRequest
from protocol.wire import wire_pb2 as pb

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow fp32."""

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 1 << 14
"""Entries of ``allowed_token_ids``: some 50 kB in the message of each choice."""

MAX_LOGPROBS = 20
"""Most likely tokens beside each token of an output whose length is not limited by its report."""

MAX_LOGPROB_TOKENS = 128
"""Entries of ``logprob_token_ids``, as in vLLM."""

MAX_OUTPUT_LOGPROBS = 1 << 19
"""Log-probabilities of one output with more than MAX_LOGPROBS beside each token: the whole of the
largest vocabularies (Gemma's has 2^18 tokens) beside one token, and 4 MB of a message."""

MAX_GRAMMAR_BYTES = 256 << 10
MAX_LEXER_STATES = 20_000
"""Lexer states of a grammar in use. A state takes 1-2 kB, so this bounds the memory that a hostile
grammar can take."""

MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of all tokens of a prompt, the actual and the most likely ones: they take some
2 MiB of a message."""


class Bounds(NamedTuple):
    """Inclusive range of a number; ``open_low`` excludes the least value itself."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: object) -> bool:
        """Return whether ``value`` is in the range. NaN is in no range."""
        assert isinstance(value, int | float)
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low}, {self.high}]"


BIAS_RANGE = (-100.0, 100.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn: a pure function of these fields, the tokens so far, the logits
    and the position.

    Every construction checks the values and raises InvalidRequest, which names the field. The
    defaults from ``top_p`` on change nothing.
    """

    temperature: Annotated[float, Bounds(0, 100)] = 1.0  # below GREEDY_BELOW: greedy
    seed: Annotated[int, Bounds(0, MAX_SEED)] = 0
    choice: int = 0  # index among the n choices of one prompt; each is a request, with own noise

    max_tokens: int = 16  # output tokens, those already emitted included
    min_tokens: int = 0  # until then, neither an end-of-text token nor a stop token is drawn
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    top_p: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    top_k: Annotated[int, Bounds(0, MAX_TOP_K)] = 0  # 0: off
    min_p: Annotated[float, Bounds(0, 1)] = 0.0  # relative to the most likely token's probability
    presence_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Bounds(0, 10, open_low=True)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)

    allowed_token_ids: tuple[int, ...] = ()  # no other token is drawn; empty: every token may be

    # Number of most likely tokens to report beside each output or prompt token; None: no report.
    logprobs: Annotated[int | None, Bounds(0, MAX_OUTPUT_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, Bounds(0, MAX_PROMPT_LOGPROBS)] = None
    logprob_token_ids: tuple[int, ...] = ()  # output tokens' report has these, not the most likely

    # Grammar that the output must match, as JSON of llguidance's TopLevelGrammar; empty: none.
    grammar: str = ""

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and value not in bounds:
                raise _out_of_range(name, bounds, value)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}",
                "min_tokens",
            )
        _check_length("grammar", self.grammar, MAX_GRAMMAR_BYTES, "characters")
        _check_length("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        _check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        _check_length("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
        _check_length("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKENS)
        self._check_report()
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias must name a token once, not twice", "logit_bias")
        low, high = BIAS_RANGE
        for token, value in self.logit_bias:
            if not low <= value <= high:  # written so that NaN is refused
                expected = f"[{low:g}, {high:g}]"
                raise _out_of_range("logit_bias", expected, f"{value} for token {token}")

    def _check_report(self) -> None:
        count, field = len(self.logprob_token_ids), "logprob_token_ids"
        if count and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids is only allowed with logprobs", field)
        if not count:
            count, field = self.logprobs or 0, "logprobs"
        if count > MAX_LOGPROBS and (count + 1) * self.max_tokens > MAX_OUTPUT_LOGPROBS:
            raise InvalidRequest(
                f"{field}: {count} tokens are reported beside each of at most"
                f" {MAX_OUTPUT_LOGPROBS // (count + 1)} output tokens, not {self.max_tokens}",
                field,
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_filters(self) -> bool:
        """Whether some tokens must not be drawn because they are too unlikely."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_BOUNDS: dict[str, Bounds] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_OPTIONAL_FIELDS = {field.name for field in pb.Sampling.DESCRIPTOR.fields if field.has_presence}


def sampling_params_to_wire(params: SamplingParams) -> pb.Sampling:
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    bias = [pb.LogitBias(token=token, bias=value) for token, value in params.logit_bias]
    return pb.Sampling(**fields | {"logit_bias": bias})


def sampling_params_from_wire(message: pb.Sampling) -> SamplingParams:
    """Return the parameters in ``message``. Raises InvalidRequest when a value is out of its
    range, because the peer is not trusted."""
    fields = {name: getattr(message, name) for name in SamplingParams.__struct_fields__}
    present = {field.name for field, _ in message.ListFields()}
    fields |= dict.fromkeys(_OPTIONAL_FIELDS - present)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        fields[name] = tuple(getattr(message, name))
    fields["logit_bias"] = tuple((pair.token, pair.bias) for pair in message.logit_bias)
    return SamplingParams(**fields)


def _check_length(name: str, values: Sized, most: int, unit: str = "entries") -> None:
    if len(values) > most:
        raise InvalidRequest(f"{name} must have at most {most} {unit}, not {len(values)}", name)


def _out_of_range(name: str, bounds: object, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be in {bounds}, not {value}", name)
