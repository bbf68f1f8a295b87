"""``PromptEncoder``: texts and chats become token ids, with a bound on what each costs others.

    text -- more bytes than its tokens could stand for --> refused at once
         |- short      on the event loop
         |- longer     a thread of a lane that tenants share
         '- long       a child process of another lane, one for each tenant at once
    chat -- small, common template --> rendered on the event loop within a budget, then as a text
         '- else       rendered and tokenized in a child process

A tokenizer or a template cannot be interrupted in a thread. So threads get only what is known to
end soon, and a child is killed when its request's first token is due, or when it takes too much
processor time or memory. The router's ``ModelFormats`` owns the encoder; ``generation_plan`` calls
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from router.common.child_pool import ChildDied, ChildNotReady, ChildPool
from router.common.errors import ApiError, internal_error, invalid
from router.common.work_lane import WorkClaim, WorkLane
from router.openai.bodies.messages import Message, message_chars
from router.openai.chat.metered_template import TooCostly
from router.openai.chat.template import ChatTemplate
from router.openai.prompts.prompt_child import (
    MEMORY_BYTES,
    MESSAGES,
    RENDER_CPU_S,
    PromptReply,
    PromptRequest,
    prompt_tail,
)
from router.text.token_bound import TokenBound

LONG_PROMPT = 8192
"""Characters from which a prompt is tokenized in a thread (some 8 ms): streams must not wait."""

LONG_IDS = 4096
"""Tokens from which a text is decoded in a thread (some 2 ms)."""

VERY_LONG_PROMPT = 128 << 10
"""Characters from which a child does it: a thread takes some 0.3 s and 60 MB for fewer."""

LONG_CHAT = 64 << 10
LONG_CHAT_MESSAGES = 1024
"""Characters and messages from which a chat is rendered in a child."""

MakeRequest = Callable[[], PromptRequest]
"""Called in the lane's thread: a long prompt takes some 30 ms to write."""

THREADS = 4
CHILDREN = 2


class TokenLimit(NamedTuple):
    """How long a prompt may be."""

    most: int  # tokens that the model takes
    check: Callable[[int, bool], None]
    """Raises ApiError for a number of tokens that does not fit; the flag: it has at least that
    many."""
    kept: int | None = None  # only so many are needed, the last ones


class EncodedChat(NamedTuple):
    """A rendered chat. ``tail``: its last characters, which tell whether reasoning has begun."""

    ids: list[int]
    tail: str


class PromptEncoder:
    """The tokenizer of one router's requests. Closed with the router."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_path: Path,
        *,
        render_cpu_s: float = RENDER_CPU_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._bound = TokenBound.of(tokenizer)
        self._render_cpu_s = render_cpu_s  # of a child, for one chat
        self._threads = WorkLane("tokenize", THREADS, per_tenant=THREADS - 1)
        self._child_lane = WorkLane("prompt", CHILDREN, per_tenant=1)
        self.children = ChildPool("router.openai.prompts.prompt_child", model_path.absolute())

    def close(self) -> None:
        self.children.close()
        self._threads.close()
        self._child_lane.close()

    async def encode_text(
        self,
        text: str,
        limit: TokenLimit,
        claim: WorkClaim,
        *,
        special: bool = True,
        field: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a completion's prompt, the value of ``field``. ``special``: with
        the tokens that the model puts in front.

        Raises ApiError: what ``limit.check`` raises, 400 for text that is not valid Unicode, and
        429 where there is no time for it.
        """
        _check_unicode(text, field)
        self._check_least(text, limit)
        if len(text) >= VERY_LONG_PROMPT:

            def request() -> PromptRequest:
                return PromptRequest(
                    text=text,
                    add_special_tokens=special,
                    most_tokens=limit.most,
                    kept_tokens=limit.kept,
                )

            return (await self._encode_in_child(request, field, limit, claim)).ids

        def encode(_seconds: float) -> list[int]:
            # Only the batch call releases the interpreter lock.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            limit.check(len(encoding), False)
            ids: list[int] = encoding.ids
            return ids if limit.kept is None else ids[-limit.kept :]

        if len(text) < LONG_PROMPT:
            return encode(0.0)
        return await self._threads.run(claim, field, encode)

    async def decode(self, ids: Sequence[int], claim: WorkClaim) -> str:
        """Return the text of tokens, special ones included. Raises ApiError (429)."""

        def decode(_seconds: float) -> str:
            [text] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
            return str(text)

        if len(ids) < LONG_IDS:
            return decode(0.0)
        return await self._threads.run(claim, "tokens", decode)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        limit: TokenLimit,
        claim: WorkClaim,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        special: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> EncodedChat:
        """Return the token ids of a chat, and its end as text. Raises ApiError like
        ``encode_text``, and 400 where the template refuses the messages or takes too much for
        them. ``special``: beside what the template has written, with the tokens that the model
        puts around a text."""
        template, options = self._template, dict(options or {})
        assert template is not None, "a model without a template gets no chats"
        if _is_short(messages, tools, options):
            try:
                text, mark = template.render(
                    messages,
                    tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final=continue_final,
                    options=options,
                    metered=True,
                )
            except TooCostly:
                pass
            else:
                if len(text) < VERY_LONG_PROMPT:
                    ids = await self._encode_rendered(template, text, mark, limit, claim)
                    return EncodedChat(self._cut(ids, limit, special), prompt_tail(text, mark))

        def request() -> PromptRequest:
            return PromptRequest(
                messages=_messages_json(messages),
                tools=tools,
                options=options,
                add_generation_prompt=add_generation_prompt,
                continue_final=continue_final,
                most_tokens=limit.most,
                kept_tokens=limit.kept,
                render_cpu_s=self._render_cpu_s,
            )

        reply = await self._encode_in_child(request, "messages", limit, claim)
        return EncodedChat(self._cut(reply.ids, limit, special), reply.tail)

    def _cut(self, ids: list[int], limit: TokenLimit, special: bool) -> list[int]:
        """Return the tokens of a chat that are kept."""
        if special:
            ids = surround(self._tokenizer, ids)
        return ids if limit.kept is None else ids[-limit.kept :]

    async def _encode_rendered(
        self, template: ChatTemplate, text: str, mark: str, limit: TokenLimit, claim: WorkClaim
    ) -> list[int]:
        self._check_least(text.replace(mark, "") if mark else text, limit)
        if len(text) < LONG_PROMPT:
            return template.encode(text, mark)
        return await self._threads.run(
            claim, "messages", lambda _seconds: template.encode(text, mark)
        )

    def _check_least(self, text: str, limit: TokenLimit) -> None:
        if len(text) < LONG_PROMPT:  # counted exactly in the same time
            return
        least = self._bound.least_tokens(text)
        if least > limit.most:
            limit.check(least, True)

    async def _encode_in_child(
        self, request: MakeRequest, field: str, limit: TokenLimit, claim: WorkClaim
    ) -> PromptReply:
        run = functools.partial(self._exchange, request, field)
        reply = await self._child_lane.run(claim, field, run)
        limit.check(reply.count, reply.at_least)
        return reply

    def _exchange(self, make: MakeRequest, field: str, seconds: float) -> PromptReply:
        """Let a child encode a prompt; runs in a thread. Raises ApiError or TimeoutError."""
        last = PromptReply()

        def read(line: bytes) -> bool:
            nonlocal last
            last = msgspec.json.decode(line, type=PromptReply)
            return not last.stage

        try:
            self.children.exchange(msgspec.json.encode(make()), seconds, read)
        except ChildNotReady as error:
            raise internal_error(f"{field} cannot be tokenized: {error}") from None
        except ChildDied as death:
            raise self._too_expensive(field, death, rendering=not last.stage) from None
        if last.problem:
            raise invalid(last.problem, last.param or None, last.code or None)
        return last

    def _too_expensive(self, field: str, death: ChildDied, *, rendering: bool) -> ApiError:
        if not death.is_limit:
            return internal_error(f"{field} could not be tokenized; the child process failed")
        if field == "messages" and rendering:
            message = (
                f"messages take the chat template more than {self._render_cpu_s:g} s or"
                f" {MEMORY_BYTES >> 30} GiB"
            )
            return invalid(message, field, "invalid_messages")
        message = f"{field} takes too much time or memory to tokenize; send a shorter one"
        return invalid(message, field, "context_length_exceeded")


def surround(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return ``ids`` with the special tokens that the tokenizer puts around any text."""
    sample = tokenizer.encode("a")
    if 0 not in sample.special_tokens_mask:
        return ids
    first = sample.special_tokens_mask.index(0)
    last = len(sample.ids) - sample.special_tokens_mask[::-1].index(0)
    return [*sample.ids[:first], *ids, *sample.ids[last:]]


def _messages_json(messages: Sequence[Message]) -> msgspec.Raw:
    try:
        return msgspec.Raw(MESSAGES.dump_json(list(messages)))
    except ValueError:
        message = "messages must be text, but hold half of a surrogate pair"
        raise invalid(message, "messages") from None


def _is_short(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> bool:
    if len(messages) > LONG_CHAT_MESSAGES:
        return False
    chars = sum(map(message_chars, messages))
    if chars <= LONG_CHAT and (tools or options):
        chars += len(msgspec.json.encode([tools, options]))
    return chars <= LONG_CHAT


def _check_unicode(text: str, field: str) -> None:
    """Raises ApiError (400): the tokenizers library would report a wrong type."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{field} must be text, but holds half of a surrogate pair"
        raise invalid(message, field) from None
