"""Renders and tokenizes prompts in a process of its own, where an expensive one does no harm.

``prompt_encoder`` starts this program, through ``router.common.child_pool``, with the path of the
model's folder:

    -> PromptRequest, a line of JSON     <- {"stage": "tokenize"}, once a chat is rendered
                                         <- {"count": ..., "ids": [...]}, or {"problem": ...}
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from protocol.errors import StartupError
from router.common.child_program import ChildWire, limit_cpu, short_text
from router.common.errors import ApiError
from router.openai.bodies.messages import Messages
from router.openai.chat.template_files import load_template
from router.openai.reasoning.reasoning_syntax import PROMPT_TAIL
from router.text.token_bound import TokenBound
from router.text.vocabulary import load_tokenizer

RENDER_CPU_S = 5.0
TOKENIZE_CPU_S = 30.0
"""Processor time of one prompt: 8 MiB take some 5 s."""

MEMORY_BYTES = 2 << 30
"""Memory that one prompt may add to the process: a token takes some 125 bytes while it is made."""

NO_MESSAGES = msgspec.Raw(b"null")
MESSAGES: TypeAdapter[Any] = TypeAdapter(Messages)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a chat; ``messages`` is JSON as a client sends it, ``null`` for a text."""

    text: str = ""
    add_special_tokens: bool = False  # to a text; templates write them themselves
    messages: msgspec.Raw = NO_MESSAGES
    tools: Sequence[dict[str, Any]] = ()
    options: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final: bool = False
    most_tokens: int  # a longer prompt is counted only
    kept_tokens: int | None = None  # only so many are returned, the last ones
    render_cpu_s: float = RENDER_CPU_S


class PromptReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage that begins, or the prompt, or what is wrong with it."""

    stage: str = ""
    count: int = 0
    at_least: bool = False  # ``count`` is a lower bound
    ids: list[int] = []
    tail: str = ""  # of a rendered chat, as in ``EncodedChat``
    problem: str = ""
    param: str = ""
    code: str = ""


def prompt_tail(text: str, mark: str) -> str:
    """Return the last characters of a rendered chat, without the breaks in it."""
    tail = text[-2 * PROMPT_TAIL :]
    return (tail.replace(mark, "") if mark else tail)[-PROMPT_TAIL:]


class PromptProgram:
    """One child: the model's tokenizer and chat template, and the socket to the router."""

    def __init__(self, wire: ChildWire, folder: str) -> None:
        """Raises StartupError for a folder that cannot be used."""
        self._wire = wire
        self._tokenizer = load_tokenizer(folder)
        self._template = load_template(folder, self._tokenizer)
        self._bound = TokenBound.of(self._tokenizer)

    def reply_to(self, line: bytes) -> None:
        """Send the reply to one request."""
        request = msgspec.json.decode(line, type=PromptRequest)
        try:
            reply = self._encode(request)
        except ApiError as error:
            reply = PromptReply(
                problem=error.message, param=error.param or "", code=error.code or ""
            )
        limit_cpu(0)
        self._wire.send(reply)

    def _encode(self, request: PromptRequest) -> PromptReply:
        if bytes(request.messages) == bytes(NO_MESSAGES):
            return self._encode_text(request)
        assert self._template is not None, "a model without a template gets no chats"
        limit_cpu(request.render_cpu_s)
        text, mark = self._template.render(
            MESSAGES.validate_json(bytes(request.messages)),
            request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final=request.continue_final,
            options=request.options,
        )
        limit_cpu(TOKENIZE_CPU_S)
        self._wire.send(PromptReply(stage="tokenize"))
        kept = request.kept_tokens
        least = self._bound.least_tokens(text.replace(mark, "") if mark else text)
        if kept is None and least > request.most_tokens:
            return PromptReply(count=least, at_least=True)
        ids = self._template.encode(text, mark)
        if kept is None and len(ids) > request.most_tokens:
            return PromptReply(count=len(ids))
        shown = ids if kept is None else ids[-kept:]
        return PromptReply(count=len(ids), ids=shown, tail=prompt_tail(text, mark))

    def _encode_text(self, request: PromptRequest) -> PromptReply:
        limit_cpu(TOKENIZE_CPU_S)
        [encoding] = self._tokenizer.encode_batch_fast(
            [request.text], add_special_tokens=request.add_special_tokens
        )
        count, kept = len(encoding), request.kept_tokens
        if kept is None and count > request.most_tokens:
            return PromptReply(count=count)
        return PromptReply(count=count, ids=encoding.ids if kept is None else encoding.ids[-kept:])


def main() -> None:
    wire = ChildWire()
    try:
        program = PromptProgram(wire, sys.argv[1])
    except StartupError as error:
        return wire.say_ready(short_text(error))
    wire.say_ready()
    return wire.serve(MEMORY_BYTES, program.reply_to)


if __name__ == "__main__":
    main()
