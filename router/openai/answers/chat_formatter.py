"""Formats responses of ``/v1/chat/completions``: ``chat.completion`` objects and their chunks.

A stream has for each choice a chunk with the role, then text or tool calls, then the finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.choice_text import ChoiceDelta, FinishReason
from router.generation.explain import Explanation
from router.generation.output_text import SentToken
from router.openai.answers.formatter import (
    ChunkStream,
    FinishedChoice,
    ResponseHeader,
    TokenNaming,
    chat_logprobs,
    prompt_token_logprobs,
)
from router.openai.answers.wire_json import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Function,
    PromptToken,
    ToolCall,
    Usage,
    UsageField,
    encode,
)
from router.openai.chat.output_parser import OutputParser, ParsedDelta, ReasoningDelta
from router.openai.chat.output_plan import OutputPlan
from router.openai.parser_names import ReasoningFields
from router.openai.tool_calls.tool_parser import CallStart, ContentDelta

_ROLE = ChatDelta(role="assistant", content="", refusal=None)
_NOTHING = ChatDelta()
_EMPTY = ChatDelta(content="")
_EMPTY_JSON = b'"content":""'  # occurs once in a chunk with ``_EMPTY``: strings escape their quotes
_PLACEHOLDER = "\0"  # text of a chunk to be split: nothing else in it has this character

REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Names by which clients read the reasoning: vLLM's, and DeepSeek's."""


def reasoning_fields(setting: ReasoningFields) -> tuple[str, ...]:
    """Return the names of the fields for a value of ``api.reasoning_field``."""
    return REASONING_FIELDS if setting == "both" else (setting,)


class ChatResponseOptions(NamedTuple):
    """What a chat response shows beside the text."""

    logprobs: bool
    token_ids: bool
    include_usage: bool = False
    prompt_logprobs: bool = False
    reasoning_fields: tuple[str, ...] = REASONING_FIELDS
    echo: str = ""  # text of the prompt with which the content begins


class ChatFormatter(ChunkStream):
    """The formatter of one request; ``output`` parses the text of its choices."""

    def __init__(
        self,
        header: ResponseHeader,
        naming: TokenNaming,
        options: ChatResponseOptions,
        output: OutputPlan,
        prompt: tuple[int, ...],
    ) -> None:
        super().__init__(include_usage=options.include_usage)
        self._header = header
        self._naming = naming
        self._options = options
        self._output = output
        self._prompt = prompt
        self._role = msgspec.structs.replace(_ROLE, content=options.echo)
        self._open: dict[int, _OpenChoice] = {}

    def chunks(self, delta: ChoiceDelta, usage: UsageField) -> list[bytes]:
        first = delta.choice not in self._open
        if first:
            self._open[delta.choice] = _OpenChoice(self._output, self._shows_tokens)
        state = self._open[delta.choice]
        if (
            state.is_text_alone
            and not (first or delta.finish)
            and (usage is UNSET or usage is None)
        ):
            return [self._text_chunk(delta.choice, state, delta.text, usage)] if delta.text else []
        if (
            state.parser.is_reasoning_alone(delta.text)
            and not (first or delta.finish or self._shows_tokens)
            and (usage is UNSET or usage is None)
        ):
            return [self._reasoning_chunk(delta.choice, state, delta.text, usage)]
        pieces = state.parser.push(delta.text, last=delta.finish is not None)
        state.is_text_alone = state.parser.is_text_alone and not self._shows_tokens
        state.shown += delta.shown
        state.ids += delta.ids
        parsed = collect(pieces)
        deltas = [self._role] if first else []
        tail = delta.finish is not None and bool(state.ids or state.shown) and self._shows_tokens
        if parsed.reasoning or parsed.content or parsed.calls or tail:
            deltas.append(
                ChatDelta(
                    content=parsed.content or UNSET,
                    reasoning=self._field("reasoning", parsed),
                    reasoning_content=self._field("reasoning_content", parsed),
                    tool_calls=parsed.calls or UNSET,
                )
            )
        chunks = [self._chunk(delta.choice, state, d, self._usage_with(d, usage)) for d in deltas]
        if delta.finish is not None:
            reason = self._reason(delta.finish, state.parser)
            chunks.append(self._chunk(delta.choice, state, _NOTHING, usage, reason))
        return chunks

    def final_chunk(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        return encode(self._chat_chunk([], usage, baton))

    def response(
        self, choices: list[FinishedChoice], usage: UsageField, baton: Explanation | UnsetType
    ) -> bytes:
        header = self._header
        return encode(
            Chat(
                id=header.id,
                created=header.created,
                model=header.model,
                choices=[self._choice(choice) for choice in choices],
                usage=usage,
                system_fingerprint=header.fingerprint,
                prompt_logprobs=self._prompt_logprobs(choices),
                prompt_token_ids=self._prompt if self._options.token_ids else UNSET,
                baton=baton,
            )
        )

    @property
    def _shows_tokens(self) -> bool:
        """Return whether tokens are shown beside the text."""
        return self._options.logprobs or self._options.token_ids

    def _usage_with(self, delta: ChatDelta, usage: UsageField) -> UsageField:
        """Return the usage to show beside ``delta``: the role comes before any token."""
        if delta is self._role and isinstance(usage, Usage):
            return usage.before_output()
        return usage

    def _text_chunk(self, index: int, state: _OpenChoice, text: str, usage: UsageField) -> bytes:
        """Format a chunk with text alone: only the text is encoded anew."""
        if state.around_text is None:
            before, after = self._chunk(index, state, _EMPTY, usage).split(_EMPTY_JSON)
            state.around_text = before + b'"content":', after
        before, after = state.around_text
        return before + encode(text) + after

    def _reasoning_chunk(
        self, index: int, state: _OpenChoice, text: str, usage: UsageField
    ) -> bytes:
        """Format a chunk with reasoning alone: only the text is encoded anew."""
        if state.around_reasoning is None:
            parsed = ParsedOutput("", [], _PLACEHOLDER)
            shown = ChatDelta(
                reasoning=self._field("reasoning", parsed),
                reasoning_content=self._field("reasoning_content", parsed),
            )
            chunk = self._chunk(index, state, shown, usage)
            state.around_reasoning = chunk.split(encode(_PLACEHOLDER))
        return encode(text).join(state.around_reasoning)

    def _field(self, name: str, parsed: ParsedOutput) -> str | UnsetType:
        """Return the reasoning, for the field of this name."""
        shown = name in self._options.reasoning_fields
        return parsed.reasoning if shown and parsed.reasoning else UNSET

    def _choice(self, answer: FinishedChoice) -> ChatChoice:
        parser = OutputParser(self._output)
        parsed = collect(parser.push(answer.text, last=True))
        calls = [msgspec.structs.replace(call, index=UNSET) for call in parsed.calls]
        content = self._options.echo + parsed.content
        has_other = bool(calls or parsed.reasoning or parser.has_hidden)
        return ChatChoice(
            index=answer.choice,
            message=ChatMessage(
                content=content if content or not has_other else None,
                reasoning=self._field("reasoning", parsed),
                reasoning_content=self._field("reasoning_content", parsed),
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(answer.shown),
            finish_reason=self._reason(answer.finish, parser),
            token_ids=answer.ids if self._options.token_ids else UNSET,
        )

    def _chunk(
        self,
        index: int,
        state: _OpenChoice,
        delta: ChatDelta,
        usage: UsageField,
        finish: FinishReason | None = None,
    ) -> bytes:
        """Format one chunk. Only a delta with text or calls carries the pending token data."""
        logprobs: ChatLogprobs | None = None
        ids: list[int] = []
        if delta is not self._role and delta is not _NOTHING:
            logprobs, ids = self._logprobs(state.shown), state.ids
            state.shown, state.ids = [], []
        choice = ChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish,
            token_ids=ids if self._options.token_ids else UNSET,
        )
        return encode(self._chat_chunk([choice], usage))

    def _chat_chunk(
        self,
        choices: list[ChunkChoice],
        usage: UsageField,
        baton: Explanation | UnsetType = UNSET,
    ) -> ChatChunk:
        header = self._header
        starts = bool(choices) and choices[0].delta is self._role and self._options.token_ids
        return ChatChunk(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=choices,
            usage=usage,
            system_fingerprint=header.fingerprint,
            prompt_token_ids=self._prompt if starts else UNSET,
            baton=baton,
        )

    def _prompt_logprobs(
        self, choices: list[FinishedChoice]
    ) -> list[dict[str, PromptToken] | None] | UnsetType:
        if not self._options.prompt_logprobs:
            return UNSET
        return prompt_token_logprobs(self._prompt, choices[0].prompt_logprobs, self._naming)

    def _logprobs(self, shown: list[SentToken]) -> ChatLogprobs | None:
        return chat_logprobs(shown, self._naming) if self._options.logprobs else None

    def _reason(self, finish: FinishReason, parser: OutputParser) -> FinishReason:
        reason: Any = self._output.finish_reason(finish, called=parser.called)
        return cast(FinishReason, reason)


class _OpenChoice:
    """A choice that is being streamed."""

    def __init__(self, plan: OutputPlan, shows_tokens: bool) -> None:
        self.parser = OutputParser(plan)
        self.is_text_alone = self.parser.is_text_alone and not shows_tokens  # what chunks differ in
        self.shown: list[SentToken] = []  # of text that the parser may hold back
        self.ids: list[int] = []
        self.around_text: tuple[bytes, bytes] | None = None  # JSON before and after the text
        self.around_reasoning: list[bytes] | None = None


class ParsedOutput(NamedTuple):
    """What one text holds; each call at most once, with new arguments only."""

    content: str
    calls: list[ToolCall]
    reasoning: str = ""


def collect(pieces: Sequence[ParsedDelta]) -> ParsedOutput:
    """Join the pieces of one delta to OpenAI's types."""
    content = "".join([piece.text for piece in pieces if isinstance(piece, ContentDelta)])
    reasoning = "".join([piece.text for piece in pieces if isinstance(piece, ReasoningDelta)])
    starts: dict[int, CallStart] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, ContentDelta | ReasoningDelta):
            continue
        if isinstance(piece, CallStart):
            starts[piece.call] = piece
        text = "" if isinstance(piece, CallStart) else piece.text
        arguments[piece.call] = arguments.get(piece.call, "") + text
    calls = [_call(c, starts.get(c), text) for c, text in arguments.items()]
    return ParsedOutput(content, calls, reasoning)


def _call(index: int, start: CallStart | None, arguments: str) -> ToolCall:
    if start is None:
        return ToolCall(index=index, function=Function(arguments=arguments))
    function = Function(name=start.name, arguments=arguments)
    return ToolCall(index=index, id=start.id, type="function", function=function)
