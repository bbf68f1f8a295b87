"""Log-probabilities of the tokens in an output's messages.

    text, tokens --split()--> text of one token --OutputParser--> pieces of a message
                                                                     |
                          LoggedMessage: deltas and parts <--take()--+

``ResponsesFormatter`` creates one ``MessageTokens`` for each output whose log-probabilities were
requested. Tokens of reasoning, of calls and of a model's own markers are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from router.generation.output_text import SentToken
from router.openai.answers.formatter import TokenNaming, chat_logprobs
from router.openai.answers.wire_json import TokenLogprob, encode
from router.openai.responses.output_items import EventCounter, OpenMessage
from router.openai.responses.response_json import (
    EventLogprob,
    EventTopLogprob,
    ItemStatus,
    MessageItem,
    OutputTextPart,
)

MAX_REPEATED_LOGPROBS = 1 << 14
"""Log-probabilities of one message that the end of a stream repeats. It encodes them four times;
of a longer message, only the deltas have them."""


class MessageTokens:
    """The tokens of one output. ``streamed``: they are sent while the output is written."""

    def __init__(self, naming: TokenNaming, *, streamed: bool) -> None:
        self.streamed = streamed
        self._naming = naming
        self._length = 0  # characters of the output so far
        self._waiting: list[tuple[SentToken, int]] = []  # each with the length of its text

    def split(self, text: str, shown: Sequence[SentToken]) -> Iterator[str]:
        """Yield the text of each token after the token has been added to those that wait.
        ``shown``: the tokens whose text has now come in full."""
        start, self._length = self._length, self._length + len(text)
        places = [min(max(token.offset - start, 0), len(text)) for token in shown]
        ends = [*places, len(text)]
        if ends[0]:
            yield text[: ends[0]]
        for token, place, end in zip(shown, places, ends[1:], strict=True):
            self._waiting.append((token, end - place))
            if end > place:
                yield text[place:end]

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens of ``text``, the last text that the parser has found in a message.
        Tokens before it belong to no message and are dropped."""
        covered, taken = 0, list[SentToken]()
        for token, length in reversed(self._waiting):
            if length and covered >= len(text):
                break
            covered += length
            # One character may take several tokens, of which the last one has its text.
            if length or not self._naming.vocabulary.is_textless(token.token):
                taken.append(token)
        self._waiting.clear()
        return chat_logprobs(taken[::-1], self._naming).content

    def drop(self) -> None:
        """Forget the tokens that wait: they belong to no message."""
        self._waiting.clear()


class LoggedMessage(OpenMessage):
    """A message with log-probabilities. Makes no events for an answer that is not streamed."""

    def __init__(self, events: EventCounter, index: int, tokens: MessageTokens) -> None:
        super().__init__(events, index)
        self._tokens = tokens
        self._logprobs: list[TokenLogprob] = []  # that the end repeats
        self._count = 0

    def push(self, text: str) -> bytes:
        logprobs = self._tokens.take(text)
        self._texts.append(text)
        self._keep(logprobs)
        if not self._tokens.streamed:
            return b""
        shown = encode([_for_event(token) for token in logprobs])
        return self._events.delta(self._head, text, b',"logprobs":%b}\n\n' % shown)

    def close(self, status: ItemStatus) -> bytes:
        return super().close(status) if self._tokens.streamed else b""

    def part(self, text: str) -> dict[str, object]:
        return {**super().part(text), "logprobs": self._logprobs}

    def done(self, text: str) -> dict[str, object]:
        return {"text": text, "logprobs": [_for_event(token) for token in self._logprobs]}

    def item(self, status: ItemStatus) -> MessageItem:
        item = super().item(status)
        parts = [OutputTextPart(part.text, logprobs=self._logprobs) for part in item.content]
        return msgspec.structs.replace(item, content=parts)

    def _keep(self, logprobs: list[TokenLogprob]) -> None:
        self._count += sum(1 + len(token.top_logprobs) for token in logprobs)
        if self._tokens.streamed and self._count > MAX_REPEATED_LOGPROBS:
            self._logprobs.clear()
        else:
            self._logprobs += logprobs


def _for_event(token: TokenLogprob) -> EventLogprob:
    top = [EventTopLogprob(other.token, other.logprob) for other in token.top_logprobs]
    return EventLogprob(token.token, token.logprob, top)
