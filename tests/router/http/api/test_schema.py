from __future__ import annotations

from typing import Any

import pytest

from router.common.errors import ApiError
from router.openai.bodies.completion_body import parse_completion as parse

GOOD: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refusal(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse({**GOOD, **changes})
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    body = parse(GOOD)
    assert (body.max_tokens, body.temperature, body.top_p) == (16, 1.0, 1.0)
    assert (body.stop, body.seed, body.stream, body.include_usage) == ((), None, False, False)


def test_null_is_the_default() -> None:
    body = parse({**GOOD, "max_tokens": None, "stop": None, "logprobs": None, "seed": None})
    assert body == parse(GOOD)


def test_a_full_request() -> None:
    body = parse(
        {
            **{"model": "m", "prompt": [1, 2], "max_tokens": 5, "temperature": 0, "top_p": 1},
            **{"seed": -(2**63), "stop": ["a", "b"], "ignore_eos": True, "return_token_ids": True},
            **{"stream": True, "stream_options": {"include_usage": True}, "user": "u"},
        }
    )
    assert (body.prompt, body.stop, body.seed) == ([[1, 2]], ("a", "b"), -(2**63))
    assert body.include_usage


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", 5, "not 5"),
        ("prompt", ["a", ""], "prompt[1] must not be empty"),
        ("prompt", ["a", 5], "prompt[1] must be a string or an array of token ids, not 5"),
        ("prompt", [[1], []], "prompt[1] must not be empty"),
        ("prompt", [[1], [2, -1]], "prompt[1][1] must be a token id"),
        ("prompt", ["a"] * 129, "at most 128 prompts, not 129"),
        ("prompt", [1, -2], "[1] must be a token id (an integer from 0), not -2"),
        ("prompt", [True], "not true"),
        ("prompt", [1.5], "not 1.5"),
        ("prompt", {"{x}": 1}, "{x}"),
        ("model", 5, "a string, not 5"),
        ("max_tokens", 0, "at least 1 without echo, not 0"),
        ("max_tokens", -1, "at least 0, not -1"),
        ("max_tokens", "16", "an integer, not '16'"),
        ("max_tokens", True, "an integer, not true"),
        ("temperature", 2.5, "at most 2, not 2.5"),
        ("temperature", float("nan"), "not nan"),
        ("temperature", float("inf"), "not inf"),
        ("top_p", 0, "above 0, not 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "at least -1, not -2"),
        ("top_k", 1.5, "not 1.5"),
        ("min_p", 1.01, "at most 1, not 1.01"),
        ("presence_penalty", 2.1, "at most 2, not 2.1"),
        ("frequency_penalty", -2.1, "at least -2, not -2.1"),
        ("frequency_penalty", float("nan"), "not nan"),
        ("repetition_penalty", 0, "above 0, not 0"),
        ("repetition_penalty", 10.1, "at most 10, not 10.1"),
        ("logit_bias", [1], "object of token ids and numbers, not [1]"),
        ("logit_bias", {"x": 1}, "token ids (integers from 0) as its keys, not 'x'"),
        ("logit_bias", {"-1": 1}, "not '-1'"),
        ("logit_bias", {"05": 1}, "not '05'"),
        ("logit_bias", {"5": 101}, "[5] must be a number in [-100, 100], not 101"),
        ("logit_bias", {"5": True}, "not true"),
        ("logit_bias", {"5": float("nan")}, "not nan"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024 entries, not 1025"),
        ("min_tokens", -1, "at least 0, not -1"),
        ("min_tokens", 17, "at most max_tokens (16), not 17"),
        ("stop_token_ids", 5, "array of token ids, not 5"),
        ("stop_token_ids", [5, -1], "[1] must be a token id (an integer from 0), not -1"),
        ("stop_token_ids", list(range(65)), "at most 64 token ids, not 65"),
        ("seed", 2**63, "below 9223372036854775808"),
        ("seed", 1.5, "not 1.5"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", ["a"] * 17, "at most 16 strings, not 17"),
        ("stop", [1], "array of strings"),
        ("stream", "yes", "not 'yes'"),
        ("stream_options", {"include_usage": True}, "only allowed with stream=true"),
        ("ignore_eos", 1, "not 1"),
        ("user", 1, "not 1"),
        ("n", 0, "at least 1, not 0"),
        ("n", 65, "at most 64, not 65"),
        ("n", True, "an integer, not true"),
        ("best_of", 0, "at least 1, not 0"),
        ("logprobs", 21, "at most 20, not 21"),
        ("logprobs", True, "an integer, not true"),
        ("prompt_logprobs", -2, "at least -1, not -2"),
        ("echo", 1, "true or false, not 1"),
        ("truncate_prompt_tokens", 0, "at least 1, not 0"),
        ("skip_special_tokens", "no", "not 'no'"),
        ("stop", ["x" * 4097], "at most 4096 characters"),
    ],
)
def test_a_mistake_names_the_field_and_what_came(field: str, value: Any, says: str) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert error.message.startswith(field)
    assert says in error.message


def test_a_missing_field() -> None:
    with pytest.raises(ApiError, match="prompt is required") as caught:
        parse({"model": "m"})
    assert caught.value.param == "prompt"


def test_an_unknown_field_of_an_option_is_refused_with_the_nearest_known() -> None:
    nested = refusal(stream=True, stream_options={"includeusage": True})
    assert nested.param == "stream_options.includeusage"
    assert "'include_usage'" in nested.message


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("suffix", "", "x"),
        ("bad_words", [], ["x"]),
        ("length_penalty", 1, True),
        ("detokenize", True, False),
        ("max_completion_tokens", None, 5),
        ("messages", None, []),
        ("input", None, "x"),
    ],
)
def test_what_is_not_built_is_taken_only_where_it_changes_nothing(
    field: str, neutral: Any, asking: Any
) -> None:
    assert parse({**GOOD, field: neutral}) == parse(GOOD)
    error = refusal(**{field: asking})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "at least n (3), not 2"),
        ({"best_of": 3, "stream": True}, "best_of", "must be n (1) with stream=true"),
        ({"n": 64, "prompt": ["a"] * 3}, "n", "at most 128, not 192"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "at most max_tokens (0)"),
    ],
)
def test_fields_that_do_not_go_together(given: dict[str, Any], field: str, says: str) -> None:
    error = refusal(**given)
    assert error.param == field
    assert says in error.message


def test_nothing_of_the_output_may_be_wanted_with_echo() -> None:
    assert parse({**GOOD, "max_tokens": 0, "echo": True}).max_tokens == 0


def test_each_prompt_of_an_array() -> None:
    assert parse({**GOOD, "prompt": ["a", [1, 2]]}).prompt == ["a", [1, 2]]
    assert parse({**GOOD, "prompt": [1, 2]}).prompt == [[1, 2]]
