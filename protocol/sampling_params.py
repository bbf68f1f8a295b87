"""How a request wants its tokens drawn: its parameters, their ranges, and their wire form."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.errors import InvalidRequest
from protocol.wire import wire_pb2 as pb

MAX_SEED = 2**63 - 1
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 256 << 10
MAX_LEXER_STATES = 20_000
"""Of a grammar in use, at 1-2 kB each: the memory that a hostile one may take."""

MAX_PROMPT_LOGPROBS = 1 << 18
"""Of all tokens of a prompt, the actual ones and the most likely ones: some 2 MiB of a message."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Least and greatest value, both allowed."""

OPEN_RANGES: dict[str, tuple[float, float]] = {
    "top_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
"""The same, but the least value is not allowed itself."""

BIAS_RANGE = (-100.0, 100.0)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. A pure function of these, the tokens so far, the logits and the
    position. The defaults of all but the first two groups change nothing."""

    temperature: float = 1.0  # below 1e-5: greedy
    seed: int = 0
    choice: int = 0  # index among the n choices of one prompt; each is a request, with own noise

    max_tokens: int = 16  # output tokens in all
    min_tokens: int = 0  # until then, neither the end of the text nor a stop token is drawn
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # of the most likely token's probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)

    logprobs: int | None = None  # most likely tokens to report beside the drawn one; None: nothing
    prompt_logprobs: int | None = None  # the same, beside each of the prompt; None: nothing

    # What the output must match, as JSON of llguidance's TopLevelGrammar; empty: anything will do.
    grammar: str = ""


def sampling_to_wire(s: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        seed=s.seed,
        choice=s.choice,
        max_tokens=s.max_tokens,
        ignore_eos=s.ignore_eos,
        stop_token_ids=s.stop_token_ids,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=[pb.LogitBias(token=token, bias=bias) for token, bias in s.logit_bias],
        min_tokens=s.min_tokens,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        grammar=s.grammar,
    )


def sampling_from_wire(s: pb.Sampling) -> Sampling:
    """Raises InvalidRequest, with the field, for what is out of its range."""
    for name, (low, high) in RANGES.items():
        if not low <= getattr(s, name) <= high:  # written so that NaN is refused
            raise _outside(name, f"[{low:g}, {high:g}]", getattr(s, name))
    for name, (low, high) in OPEN_RANGES.items():
        if not low < getattr(s, name) <= high:
            raise _outside(name, f"({low:g}, {high:g}]", getattr(s, name))
    if s.seed > MAX_SEED:
        raise InvalidRequest(f"seed must be below 2**63, not {s.seed}", "seed")
    if s.top_k > 2**31 - 1:
        raise InvalidRequest(f"top_k must be below 2**31, not {s.top_k}", "top_k")
    if s.min_tokens > s.max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most max_tokens ({s.max_tokens}), not {s.min_tokens}",
            "min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(s, name) > MAX_LOGPROBS:
            raise InvalidRequest(
                f"{name} must be at most {MAX_LOGPROBS}, not {getattr(s, name)}", name
            )
    if len(s.grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"grammar must have at most {MAX_GRAMMAR_BYTES} characters, not {len(s.grammar)}",
            "grammar",
        )
    _check_count("stop_token_ids", s.stop_token_ids, MAX_STOP_TOKENS)
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        seed=s.seed,
        choice=s.choice,
        max_tokens=s.max_tokens,
        ignore_eos=s.ignore_eos,
        stop_token_ids=tuple(s.stop_token_ids),
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=_bias_from_wire(s.logit_bias),
        min_tokens=s.min_tokens,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
        prompt_logprobs=s.prompt_logprobs if s.HasField("prompt_logprobs") else None,
        grammar=s.grammar,
    )


def _bias_from_wire(pairs: Iterable[pb.LogitBias]) -> tuple[tuple[int, float], ...]:
    bias = tuple((pair.token, pair.bias) for pair in pairs)
    _check_count("logit_bias", bias, MAX_LOGIT_BIAS)
    if len({token for token, _ in bias}) < len(bias):
        raise InvalidRequest("logit_bias must name a token once, not twice", "logit_bias")
    low, high = BIAS_RANGE
    for token, value in bias:
        if not low <= value <= high:
            raise _outside("logit_bias", f"[{low:g}, {high:g}]", f"{value} for token {token}")
    return bias


def _check_count(name: str, values: Iterable[object], most: int) -> None:
    count = sum(1 for _ in values)
    if count > most:
        raise InvalidRequest(f"{name} must have at most {most} entries, not {count}", name)


def _outside(name: str, wanted: str, came: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be in {wanted}, not {came}", name)
