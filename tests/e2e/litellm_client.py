"""Run by litellm's own Python (``.venv/litellm``), which has none of Baton's packages:

litellm_client.py URL KEY        prints one JSON object: what litellm made of the answers
"""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=150)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def text_of(parts: list) -> str:
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


async def streamed(given: dict) -> str:
    stream = await litellm.acompletion(**given, stream=True)
    return text_of([part async for part in stream])


def error_of(given: dict) -> list:
    try:
        litellm.completion(**given)
    except litellm.exceptions.APIError as error:  # the parent of none of those below
        return [type(error).__name__, error.status_code]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None)]
    return ["nothing", 200]


def main(url: str, key: str) -> dict:
    base = {"model": "openai/baton-demo", "api_base": f"{url}/v1", "api_key": key}
    greedy = {**base, "temperature": 0, "seed": 3, "num_retries": 0, "max_retries": 0}
    chat = {**greedy, "messages": [{"role": "user", "content": "sort a list"}], "max_tokens": 200}
    short = {**chat, "max_tokens": 24}
    whole = litellm.completion(**short)
    parts = list(litellm.completion(**short, stream=True, stream_options={"include_usage": True}))
    called = litellm.completion(
        **chat, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    rebuilt = litellm.stream_chunk_builder(
        list(
            litellm.completion(
                **chat,
                tools=[TOOL],
                tool_choice={"type": "function", "function": {"name": "weather"}},
                stream=True,
            )
        )
    )
    typed = litellm.completion(**chat, response_format=Person).choices[0].message.content
    text = litellm.text_completion(
        **{**greedy, "model": "text-completion-openai/baton-demo"}, prompt="def f(", max_tokens=8
    )
    return {
        "whole": whole.choices[0].message.content,
        "streamed": text_of(parts),
        "async": asyncio.run(streamed(short)),
        "usage": [whole.usage.completion_tokens, parts[-1].usage.completion_tokens],
        "called": [call.function.model_dump() for call in called.choices[0].message.tool_calls],
        "reason": called.choices[0].finish_reason,
        "rebuilt": [c.function.model_dump() for c in rebuilt.choices[0].message.tool_calls],
        "typed": Person.model_validate_json(typed).model_dump(),
        "text": text.choices[0].text,
        "errors": [
            error_of({**short, "temperature": 3}),
            error_of({**short, "api_key": "wrong"}),
            error_of({**short, "model": "openai/other"}),
            error_of({**short, "extra_headers": {"x-baton-ttft-deadline-ms": "0.001"}}),
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
