"""Bodies of chats and completions (router/openai/bodies): refused with an ApiError, or usable.

A body that is accepted can be written for the chat template, and its formats become grammars or an
ApiError.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from router.common.errors import ApiError
from router.common.request_body import too_many_items
from router.openai.bodies.chat_body import ChatBody, parse_chat
from router.openai.bodies.completion_body import CompletionBody, parse_completion
from router.openai.bodies.messages import to_template_message
from router.openai.bodies.output_formats import response_format_source, structured_outputs_source
from router.openai.bodies.tools import ToolOptions, decide_tool_choice
from tests.fuzz.target import Budget, FuzzTarget


def fuzz_one(data: bytes) -> None:
    if too_many_items(data):
        return
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):  # as in router/common/request_body.py
        return
    if not isinstance(value, dict):
        return
    raw: dict[str, Any] = {"model": "m", **value}
    for parse in (parse_chat, parse_completion):
        try:
            _use(parse(raw))
        except ApiError as error:
            assert error.status == 400
            assert len(error.body()) < 4000, "an error quotes the body"
        except InvalidRequest as error:
            assert len(str(error)) < 2000


def _use(body: ChatBody | CompletionBody) -> None:
    body.sampling_params(max_tokens=1 << 20, logprobs=None)
    if body.response_format is not None:
        response_format_source(body.response_format)
    field, wanted = body.structured
    if wanted is not None:
        structured_outputs_source(wanted, field)
    if isinstance(body, ChatBody):
        # Half of a surrogate pair, which a template may get from a call, is refused
        # when the template is rendered.
        json.dumps([to_template_message(each, developer=False) for each in body.messages])
        decide_tool_choice(ToolOptions(body.tools or (), body.tool_choice))
        for tool in body.tools or ():
            json.dumps(tool.for_template(), ensure_ascii=False).encode()


TARGET = FuzzTarget(
    "bodies", fuzz_one, Budget(base_s=0.3, s_per_byte=4e-5, base_bytes=4 << 20, bytes_per_byte=1000)
)
