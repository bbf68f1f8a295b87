"""Types of single fields in request bodies, and the base class of body models.

Each check returns the value, or raises an error that says what is wrong with it. ``parsing`` turns
the first error into an ApiError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from protocol.sampling_params import (
    BIAS_RANGE,
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKENS,
    MAX_STOP_TOKENS,
)

MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_PROMPTS = 128
MAX_PROMPT_IDS = 1 << 20
"""Token ids in one prompt: above the context length of any model."""

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
"""Names of functions and of formats, as in OpenAI's API."""

TAG_PREFIX = "="
"""First character of the tags of unions, which are not part of a field's path."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}", re.ASCII)  # one spelling for each

Prompt = str | list[int]


class StrictModel(BaseModel):
    """Base class of the objects in a request. An object with too many names is refused for the
    first unknown one: pydantic would create an error for each, which takes seconds for a large
    body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_too_many_names(cls, value: Any) -> Any:
        fields = cls.model_fields
        if isinstance(value, dict) and len(value) > len(fields):
            known = {field.alias or name for name, field in fields.items()}
            unknown = next(name for name in value if name not in known)
            raise PydanticCustomError("baton_unknown", "unknown", {"name": unknown})
        return value


def field_error(message: str, code: str | None = None) -> PydanticCustomError:
    """Return an error with this message. Passed as a value, as pydantic would format its braces."""
    return PydanticCustomError("baton", "{message}", {"message": message, "code": code})


def body_error(field: str, message: str, code: str | None = None) -> PydanticCustomError:
    """Return an error about several fields: ``message`` is complete, ``field`` is the one to
    change."""
    context = {"message": message, "code": code, "field": field}
    return PydanticCustomError("baton", "{message}", context)


def show_value(value: object) -> str:
    """Return a short text for any value, for messages."""
    if isinstance(value, str | list | dict | bytes) and len(value) > 200:
        value = value[:200] if not isinstance(value, dict) else dict(list(value.items())[:20])
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def list_alternatives(names: Iterable[str]) -> str:
    """Return ``'a', 'b' or 'c'``, for messages."""
    *first, last = [repr(name) for name in names]
    return f"{', '.join(first)} or {last}" if first else last


def _check_prompts(value: Any) -> list[Prompt]:
    """Return one prompt or many as a list."""
    if isinstance(value, str):
        return [_check_text(value, "")]
    if not isinstance(value, list):
        expected = "a string, an array of token ids, or an array of those"
        raise field_error(f"must be {expected}, not {show_value(value)}")
    if not value:
        raise field_error("must not be empty")
    if set(map(type, value)).isdisjoint((str, list)):
        return [_check_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise field_error(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    return [_check_prompt(item, f"[{place}]") for place, item in enumerate(value)]


def _check_prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return _check_text(value, path)
    if not isinstance(value, list):
        raise field_error(
            f"{path} must be a string or an array of token ids, not {show_value(value)}"
        )
    if not value:
        raise field_error(f"{path} must not be empty")
    return _check_ids(value, path)


def _check_text(value: str, path: str) -> str:
    if not value:
        raise field_error(f"{path} must not be empty".lstrip())
    return value


def _check_ids(value: list[Any], path: str = "") -> list[int]:
    if len(value) > MAX_PROMPT_IDS:
        raise field_error(
            f"{path} must hold at most {MAX_PROMPT_IDS} token ids, not {len(value)}".lstrip()
        )
    if set(map(type, value)) == {int} and min(value) >= 0:
        return value
    ids = [_whole(item) for item in value]
    for place, item in enumerate(ids):
        if type(item) is not int or item < 0:
            raise field_error(
                f"{path}[{place}] must be a token id (an integer from 0), not {show_value(item)}"
            )
    return ids


def _whole(value: Any) -> Any:
    """Return 5 for 5.0: JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_id_array(value: Any, most: int) -> tuple[int, ...]:
    """Return an array of at most ``most`` token ids."""
    if not isinstance(value, list):
        raise field_error(f"must be an array of token ids, not {show_value(value)}")
    if len(value) > most:
        raise field_error(f"must hold at most {most} token ids, not {len(value)}")
    return tuple(_check_ids(value))


def _check_stop_ids(value: Any) -> tuple[int, ...]:
    return check_id_array(value, MAX_STOP_TOKENS)


def _check_some_ids(value: Any, most: int) -> tuple[int, ...]:
    """Return each id once."""
    ids = check_id_array(value, most)
    if not ids:
        raise field_error("must not be empty")
    return tuple(dict.fromkeys(ids))


def _check_allowed_ids(value: Any) -> tuple[int, ...]:
    return _check_some_ids(value, MAX_ALLOWED_TOKENS)


def _check_logprob_ids(value: Any) -> tuple[int, ...]:
    return _check_some_ids(value, MAX_LOGPROB_TOKENS)


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise field_error(f"must be an object of token ids and numbers, not {show_value(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise field_error(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    low, high = BIAS_RANGE
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise field_error(
                f"must have token ids (integers from 0) as its keys, not {show_value(token)}"
            )
        if type(bias) not in (int, float) or not low <= bias <= high:
            raise field_error(
                f"[{token}] must be a number in [{low:g}, {high:g}], not {show_value(bias)}"
            )
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise field_error(f"must be a string or an array of strings, not {show_value(value)}")
    if len(stops) > MAX_STOPS:
        raise field_error(f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(stops):
        raise field_error("must not hold an empty string")
    if any(len(s) > MAX_STOP_CHARS for s in stops):
        raise field_error(f"must hold strings of at most {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _check_name(value: Any) -> str:
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise field_error(f"must be 1 to 64 letters, digits, '_' or '-', not {show_value(value)}")
    return value


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
StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_check_stop_ids),
    WithJsonSchema({"type": "array", "items": _IDS["items"], "maxItems": MAX_STOP_TOKENS}),
]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_check_allowed_ids),
    WithJsonSchema({**_IDS, "maxItems": MAX_ALLOWED_TOKENS}),
]
LogprobTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_check_logprob_ids),
    WithJsonSchema({**_IDS, "maxItems": MAX_LOGPROB_TOKENS}),
]
LogitBias = Annotated[
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
FunctionName = Annotated[
    str,
    PlainValidator(_check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}),
]
