"""The body of ``POST /v1/completions``, checked field by field.

Every mistake names the field, what came and what was expected. What is not built yet is accepted at
its neutral value only (``unsupported.py``); a field nobody knows is refused.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from protocol.request import PRIORITIES
from protocol.sampling import BIAS_RANGE, MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from router.errors import ApiError, invalid
from router.unsupported import check_unsupported, is_unsupported

MAX_STOPS = 4
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}", re.ASCII)  # one spelling for each


def _bad(message: str, code: str | None = None) -> PydanticCustomError:
    """An error whose message stands as it is. Braces would be read as a template otherwise."""
    return PydanticCustomError("baton", "{message}", {"message": message, "code": code})


def show(value: object) -> str:
    """A value in a message: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        if not value:
            raise _bad("must not be empty")
        return value
    if not isinstance(value, list):
        raise _bad(f"must be a string or an array of token ids, not {show(value)}")
    if not value:
        raise _bad("must not be empty")
    if any(isinstance(item, str | list) for item in value):
        raise _bad(
            "must be one prompt (a string or an array of token ids); arrays of prompts are not"
            " supported yet: send one request for each",
            "unsupported_parameter",
        )
    return _check_ids(value)


def _check_ids(value: list[Any]) -> list[int]:
    for place, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise _bad(f"[{place}] must be a token id (an integer from 0), not {show(item)}")
    return value


def _check_stop_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _bad(f"must be an array of token ids, not {show(value)}")
    if len(value) > MAX_STOP_TOKENS:
        raise _bad(f"must hold at most {MAX_STOP_TOKENS} token ids, not {len(value)}")
    return tuple(_check_ids(value))


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise _bad(f"must be an object of token ids and numbers, not {show(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise _bad(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    low, high = BIAS_RANGE
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise _bad(f"must have token ids (integers from 0) as its keys, not {show(token)}")
        if type(bias) not in (int, float) or not low <= bias <= high:
            raise _bad(f"[{token}] must be a number in [{low:g}, {high:g}], not {show(bias)}")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise _bad(f"must be a string or an array of strings, not {show(value)}")
    if len(stops) > MAX_STOPS:
        raise _bad(f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(stops):
        raise _bad("must not hold an empty string")
    return tuple(stops)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False


class CompletionBody(BaseModel):
    """A completion request as the client sent it, once checked."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    prompt: Annotated[str | list[int], PlainValidator(_check_prompt)]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_check_bias)] = ()
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_check_stop_ids)] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=PRIORITIES[0], le=PRIORITIES[1])  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = None  # a label of the caller's; nothing depends on it

    @model_validator(mode="after")
    def _options_need_stream(self) -> CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "is only allowed with stream=true")
        return self

    @model_validator(mode="after")
    def _min_within_max(self) -> CompletionBody:
        if self.min_tokens > self.max_tokens:
            message = f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            raise PydanticCustomError("min_tokens", "{message}", {"message": message})
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse(raw: dict[str, Any]) -> CompletionBody:
    """Raises ApiError (400) for the first mistake. ``null`` means the default, as with OpenAI."""
    given = {name: value for name, value in raw.items() if value is not None}
    known = {name: value for name, value in given.items() if not is_unsupported(name)}
    check_unsupported(given)
    try:
        return CompletionBody.model_validate(known)
    except ValidationError as error:
        raise _translate(error.errors(include_url=False)[0]) from None


def _translate(error: ErrorDetails) -> ApiError:
    kind = error["type"]
    if kind in ("stream_options", "min_tokens"):
        return invalid(f"{kind} {error['msg']}", kind)
    field = ".".join(str(part) for part in error["loc"])
    if kind == "extra_forbidden":
        return _unknown(field)
    if kind == "missing":
        return invalid(f"{field} is required", field, "missing_required_parameter")
    if kind == "baton":
        return invalid(f"{field} {error['msg']}", field, error["ctx"]["code"])
    wanted = error["msg"].removeprefix("Input should be ")
    return invalid(f"{field} must be {wanted}, not {show(error['input'])}", field)


def _unknown(field: str) -> ApiError:
    scope, _, name = field.rpartition(".")
    model = StreamOptions if scope else CompletionBody
    near = difflib.get_close_matches(name, model.model_fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return invalid(f"unknown parameter {field[:80]!r}{hint}", field[:80], "unknown_parameter")
