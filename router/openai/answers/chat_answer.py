"""``chat.completion`` objects, and their chunks: role, text or calls, and then the reason."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.choice_stream import Delta, FinishReason
from router.generation.explain import Explanation
from router.generation.pending_logprobs import Shown
from router.openai.answers.answer_form import Answer, Head, Naming, of_chat
from router.openai.answers.wire_json import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Function,
    ToolCall,
    UsageField,
    encode,
)
from router.openai.chat.output_plan import OutputPlan
from router.openai.chat.tool_parser import CallStart, Content, ToolParser

# MERGED router.api.said
# What one choice of a chat says: text to content and tool calls, in OpenAI's shapes.


class Said(NamedTuple):
    """``calls``: new ones, and more of the arguments of those before; each at most once."""

    content: str
    calls: list[ToolCall]


class Speech:
    """Text of one choice as it comes. ``parser``: None where all of it is content."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.called

    def push(self, text: str, *, last: bool) -> Said:
        if self._parser is None:
            return Said(text, [])
        pieces = self._parser.push(text)
        if last:
            pieces += self._parser.flush()
        content = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        starts: dict[int, CallStart] = {}
        arguments: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                continue
            if isinstance(piece, CallStart):
                starts[piece.call] = piece
            text = "" if isinstance(piece, CallStart) else piece.text
            arguments[piece.call] = arguments.get(piece.call, "") + text
        return Said(content, [_call(c, starts.get(c), text) for c, text in arguments.items()])


def _call(index: int, start: CallStart | None, arguments: str) -> ToolCall:
    if start is None:
        return ToolCall(index=index, function=Function(arguments=arguments))
    function = Function(name=start.name, arguments=arguments)
    return ToolCall(index=index, id=start.id, type="function", function=function)


_ROLE = ChatDelta(role="assistant", content="", refusal=None)
_NOTHING = ChatDelta()


class ChatShows(NamedTuple):
    logprobs: bool
    token_ids: bool


class _Open:
    """A choice that is being streamed."""

    def __init__(self, plan: OutputPlan) -> None:
        self.speech = Speech(plan.new_parser())
        self.shown: list[Shown] = []  # of text that the parser may hold back
        self.ids: list[int] = []


class ChatForm:
    """``output``: what is looked for in the text."""

    def __init__(
        self,
        head: Head,
        naming: Naming,
        shows: ChatShows,
        output: OutputPlan,
        prompt: tuple[int, ...],
    ) -> None:
        self._head = head
        self._naming = naming
        self._shows = shows
        self._output = output
        self._prompt = prompt
        self._open: dict[int, _Open] = {}

    def chunks(self, delta: Delta, usage: UsageField) -> list[bytes]:
        first = delta.choice not in self._open
        one = self._open.setdefault(delta.choice, _Open(self._output))
        one.shown += delta.shown
        one.ids += delta.ids
        said = one.speech.push(delta.text, last=delta.finish is not None)
        deltas = [_ROLE] if first else []
        tail = delta.finish is not None and bool(one.ids or one.shown) and self._tells
        if said.content or said.calls or tail:
            content = said.content or UNSET
            deltas.append(ChatDelta(content=content, tool_calls=said.calls or UNSET))
        chunks = [self._chunk(delta.choice, one, d, usage) for d in deltas]
        if delta.finish is not None:
            reason = self._reason(delta.finish, one.speech)
            chunks.append(self._chunk(delta.choice, one, _NOTHING, usage, reason))
        return chunks

    def closing(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        return encode(self._framed([], usage, baton))

    def whole(
        self, answers: list[Answer], usage: UsageField, baton: Explanation | UnsetType
    ) -> bytes:
        head = self._head
        return encode(
            Chat(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=[self._choice(answer) for answer in answers],
                usage=usage,
                system_fingerprint=head.fingerprint,
                prompt_token_ids=self._prompt if self._shows.token_ids else UNSET,
                baton=baton,
            )
        )

    @property
    def _tells(self) -> bool:
        """Tokens are shown beside the text."""
        return self._shows.logprobs or self._shows.token_ids

    def _choice(self, answer: Answer) -> ChatChoice:
        speech = Speech(self._output.new_parser())
        said = speech.push(answer.text, last=True)
        calls = [msgspec.structs.replace(call, index=UNSET) for call in said.calls]
        return ChatChoice(
            index=answer.choice,
            message=ChatMessage(
                content=said.content if said.content or not calls else None,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(answer.shown),
            finish_reason=self._reason(answer.finish, speech),
            token_ids=answer.ids if self._shows.token_ids else UNSET,
        )

    def _chunk(
        self,
        index: int,
        one: _Open,
        delta: ChatDelta,
        usage: UsageField,
        finish: FinishReason | None = None,
    ) -> bytes:
        """Only a delta with something in it takes along what is told of its tokens."""
        logprobs: ChatLogprobs | None = None
        ids: list[int] = []
        if delta is not _ROLE and delta is not _NOTHING:
            logprobs, ids = self._logprobs(one.shown), one.ids
            one.shown, one.ids = [], []
        choice = ChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish,
            token_ids=ids if self._shows.token_ids else UNSET,
        )
        return encode(self._framed([choice], usage))

    def _framed(
        self,
        choices: list[ChunkChoice],
        usage: UsageField,
        baton: Explanation | UnsetType = UNSET,
    ) -> ChatChunk:
        head = self._head
        starts = bool(choices) and choices[0].delta is _ROLE and self._shows.token_ids
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=head.fingerprint,
            prompt_token_ids=self._prompt if starts else UNSET,
            baton=baton,
        )

    def _logprobs(self, shown: list[Shown]) -> ChatLogprobs | None:
        return of_chat(shown, self._naming) if self._shows.logprobs else None

    def _reason(self, finish: FinishReason, speech: Speech) -> FinishReason:
        reason: Any = self._output.finish_reason(finish, called=speech.called)
        return cast(FinishReason, reason)
