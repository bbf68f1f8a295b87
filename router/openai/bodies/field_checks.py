"""Values of single fields: each function returns the value, or raises what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from protocol.sampling_params import BIAS_RANGE, MAX_LOGIT_BIAS, MAX_STOP_TOKENS

MAX_STOPS = 4
MAX_STOP_CHARS = 4096
MAX_PROMPTS = 128
MAX_PROMPT_IDS = 1 << 20
"""Of one prompt: above the length of any model."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}", re.ASCII)  # one spelling for each

Prompt = str | list[int]


def bad(message: str, code: str | None = None) -> PydanticCustomError:
    """An error whose message stands as it is. Braces would be read as a template otherwise."""
    return PydanticCustomError("baton", "{message}", {"message": message, "code": code})


def about(field: str, message: str, code: str | None = None) -> PydanticCustomError:
    """An error that lies between fields: ``message`` says all, ``field`` is the one to change."""
    context = {"message": message, "code": code, "field": field}
    return PydanticCustomError("baton", "{message}", context)


def show(value: object) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, str | list | dict | bytes) and len(value) > 200:
        value = value[:200] if not isinstance(value, dict) else dict(list(value.items())[:20])
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_prompts(value: Any) -> list[Prompt]:
    """One prompt or many, always as a list."""
    if isinstance(value, str):
        return [_check_text(value, "")]
    if not isinstance(value, list):
        raise bad(
            f"must be a string, an array of token ids, or an array of those, not {show(value)}"
        )
    if not value:
        raise bad("must not be empty")
    if set(map(type, value)).isdisjoint((str, list)):
        return [_check_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise bad(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    return [_check_prompt(item, f"[{place}]") for place, item in enumerate(value)]


def _check_prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return _check_text(value, path)
    if not isinstance(value, list):
        raise bad(f"{path} must be a string or an array of token ids, not {show(value)}")
    if not value:
        raise bad(f"{path} must not be empty")
    return _check_ids(value, path)


def _check_text(value: str, path: str) -> str:
    if not value:
        raise bad(f"{path} must not be empty".lstrip())
    return value


def _check_ids(value: list[Any], path: str = "") -> list[int]:
    if len(value) > MAX_PROMPT_IDS:
        raise bad(f"{path} must hold at most {MAX_PROMPT_IDS} token ids, not {len(value)}".lstrip())
    if set(map(type, value)) == {int} and min(value) >= 0:
        return value
    ids = [_whole(item) for item in value]
    for place, item in enumerate(ids):
        if type(item) is not int or item < 0:
            raise bad(f"{path}[{place}] must be a token id (an integer from 0), not {show(item)}")
    return ids


def _whole(value: Any) -> Any:
    """JSON does not tell 5.0 from 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_stop_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise bad(f"must be an array of token ids, not {show(value)}")
    if len(value) > MAX_STOP_TOKENS:
        raise bad(f"must hold at most {MAX_STOP_TOKENS} token ids, not {len(value)}")
    return tuple(_check_ids(value))


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise bad(f"must be an object of token ids and numbers, not {show(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise bad(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    low, high = BIAS_RANGE
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise bad(f"must have token ids (integers from 0) as its keys, not {show(token)}")
        if type(bias) not in (int, float) or not low <= bias <= high:
            raise bad(f"[{token}] must be a number in [{low:g}, {high:g}], not {show(bias)}")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise bad(f"must be a string or an array of strings, not {show(value)}")
    if len(stops) > MAX_STOPS:
        raise bad(f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(stops):
        raise bad("must not hold an empty string")
    if any(len(s) > MAX_STOP_CHARS for s in stops):
        raise bad(f"must hold strings of at most {MAX_STOP_CHARS} characters")
    return tuple(stops)


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP = {**_TEXT, "maxLength": MAX_STOP_CHARS}
_BIAS = {"type": "number", "minimum": BIAS_RANGE[0], "maximum": BIAS_RANGE[1]}

Integer = Annotated[int, BeforeValidator(_whole)]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {
                    "type": "array",
                    "items": {"anyOf": [_TEXT, _IDS]},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
StopIds = Annotated[
    tuple[int, ...],
    PlainValidator(_check_stop_ids),
    WithJsonSchema({"type": "array", "items": _IDS["items"], "maxItems": MAX_STOP_TOKENS}),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_check_bias),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^(0|[1-9][0-9]{0,8})$": _BIAS},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
