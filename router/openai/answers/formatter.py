"""What the formatters of completions and chats share: their interface and log-probabilities.

``GenerationResponse`` formats the choices of one request through a ``ResponseFormatter``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from protocol.requests import Logprobs
from router.common.errors import ApiError
from router.generation.choice_text import ChoiceDelta, FinishReason
from router.generation.explain import Explanation
from router.generation.output_text import SentToken
from router.openai.answers.wire_json import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptToken,
    TokenLogprob,
    TopLogprob,
    Usage,
    UsageField,
)
from router.text.vocabulary import Vocabulary

SSE_DONE = b"data: [DONE]\n\n"
SSE_COMMENT = b": keep-alive\n\n"

MIN_LOGPROB = -9999.0
"""Value for -inf and NaN, which JSON cannot express."""


class ResponseHeader(NamedTuple):
    """The fields with which a response and each of its chunks begin."""

    id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str = ""
    request_id: str = ""  # the value of ``x-request-id``


class FinishedChoice(NamedTuple):
    """A choice that has ended, for a response that is not streamed."""

    choice: int  # index
    prompt: tuple[int, ...]
    text: str
    ids: list[int]
    shown: list[SentToken]
    finish: FinishReason
    logprob: float = 0.0  # mean of its output tokens
    prompt_logprobs: Sequence[Logprobs] = ()  # from the second token on
    stop: str | None = None  # the stop string that ended the text, if one did

    @property
    def reported_tokens(self) -> int:
        """Return the number of tokens whose log-probabilities the response shows."""
        reports = (token.logprobs for token in self.shown if token.logprobs is not None)
        return sum(1 + len(report.top_tokens) for report in (*reports, *self.prompt_logprobs))


class ResponseFormatter(Protocol):
    """Formats one response, and keeps the state that its events need. Created per request.

    Each dialect of the API has one for its answers. Bytes are whole server-sent events.
    """

    def opening(self) -> bytes:
        """Return the events that are due once the request is admitted, before any token."""

    def events(self, delta: ChoiceDelta, usage: UsageField) -> bytes:
        """Return the events for what one choice has added; none where nothing is to be sent yet."""

    def closing(self, usage: Usage, baton: Explanation | UnsetType) -> bytes:
        """Return the events that follow the end of all choices."""

    def keep_alive(self) -> bytes:
        """Return an event without meaning, for a stream that would be silent for long."""

    def failed(self, error: ApiError, usage: Usage) -> bytes:
        """Return the last events of a stream that has begun and cannot go on."""

    def response(
        self, choices: list[FinishedChoice], usage: Usage, baton: Explanation | UnsetType
    ) -> bytes:
        """Return the JSON of a whole response."""


class ChunkStream(ABC):
    """The stream of a chat or a completion: one chunk in each event, then ``[DONE]``."""

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    @abstractmethod
    def chunks(self, delta: ChoiceDelta, usage: UsageField) -> list[bytes]:
        """Return the JSON of the chunks for ``delta``; none where there is nothing to send yet."""

    @abstractmethod
    def final_chunk(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        """Return the JSON of a chunk without choices."""

    def opening(self) -> bytes:
        return b""

    def events(self, delta: ChoiceDelta, usage: UsageField) -> bytes:
        chunks = self.chunks(delta, usage)
        if len(chunks) == 1:  # as a rule
            return sse_event(chunks[0])
        return b"".join([sse_event(chunk) for chunk in chunks])

    def closing(self, usage: Usage, baton: Explanation | UnsetType) -> bytes:
        data = b""
        if self._include_usage:
            data += sse_event(self.final_chunk(usage))
        if baton is not UNSET:
            data += sse_event(self.final_chunk(None if self._include_usage else UNSET, baton))
        return data + SSE_DONE

    def keep_alive(self) -> bytes:
        return SSE_COMMENT

    def failed(self, error: ApiError, usage: Usage) -> bytes:
        return sse_event(error.body())


class TokenNaming(NamedTuple):
    """Names tokens in log-probabilities."""

    vocabulary: Vocabulary
    as_ids: bool  # vLLM's return_tokens_as_token_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.vocabulary.name_of(token)


def sse_event(payload: bytes, name: bytes = b"") -> bytes:
    """Return a server-sent event; ``name``: its type, for the dialects that send one."""
    head = b"event: " + name + b"\ndata: " if name else b"data: "
    return head + payload + b"\n\n"


def clamp_logprob(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob) if logprob <= 0.0 else (0.0 if logprob > 0.0 else MIN_LOGPROB)


def completion_logprobs(shown: Sequence[SentToken], naming: TokenNaming) -> CompletionLogprobs:
    """Return completions' log-probabilities; ``top_logprobs`` includes the sampled token."""
    return CompletionLogprobs(
        tokens=[naming.name(s.token) for s in shown],
        token_logprobs=[clamp_logprob(s.logprobs.logprob) if s.logprobs else None for s in shown],
        top_logprobs=[_top(s, naming) for s in shown],
        text_offset=[s.offset for s in shown],
    )


def _top(shown: SentToken, naming: TokenNaming) -> dict[str, float] | None:
    values = shown.logprobs
    if values is None:
        return None
    top = {
        naming.name(token): clamp_logprob(logprob)
        for token, logprob in zip(values.top_tokens, values.top_logprobs, strict=True)
    }
    top.setdefault(naming.name(shown.token), clamp_logprob(values.logprob))
    return top


def chat_logprobs(shown: Sequence[SentToken], naming: TokenNaming) -> ChatLogprobs:
    """Return chats' log-probabilities."""
    return ChatLogprobs([_token(s, naming) for s in shown if s.logprobs is not None])


def _token(shown: SentToken, naming: TokenNaming) -> TokenLogprob:
    values = shown.logprobs
    assert values is not None
    octets = naming.vocabulary.octets_of
    top = [
        TopLogprob(naming.name(token), clamp_logprob(logprob), octets(token))
        for token, logprob in zip(values.top_tokens, values.top_logprobs, strict=True)
    ]
    name = naming.name(shown.token)
    return TokenLogprob(name, clamp_logprob(values.logprob), octets(shown.token), top)


def prompt_token_logprobs(
    prompt: Sequence[int], logprobs: Sequence[Logprobs], naming: TokenNaming
) -> list[dict[str, PromptToken] | None]:
    """Return vLLM's log-probabilities of a prompt: for each token itself and the most likely ones
    by their ids, and null for the first. The k-th most likely token has rank k."""
    rows: list[dict[str, PromptToken] | None] = [None]
    for token, values in zip(prompt[1:], logprobs, strict=True):
        row = {
            str(other): _prompt_token(naming, other, logprob, rank)
            for rank, (other, logprob) in enumerate(
                zip(values.top_tokens, values.top_logprobs, strict=True), 1
            )
        }
        row.setdefault(str(token), _prompt_token(naming, token, values.logprob, values.rank))
        rows.append(row)
    return rows


def _prompt_token(naming: TokenNaming, token: int, logprob: float, rank: int) -> PromptToken:
    return PromptToken(clamp_logprob(logprob), rank, naming.vocabulary.name_of(token))
