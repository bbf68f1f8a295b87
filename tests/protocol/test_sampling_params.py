"""Sampling parameters and log-probabilities on the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.requests import (
    Logprobs,
    Request,
    logprobs_from_wire,
    logprobs_to_wire,
    request_from_wire,
    request_to_wire,
)
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb

FULL: dict[str, Any] = {
    **{"temperature": 0.7, "seed": 2**62, "choice": 3, "max_tokens": 9, "min_tokens": 9},
    **{"ignore_eos": True, "stop_token_ids": (3, 4), "top_p": 0.9, "top_k": 2**31 - 1},
    **{"min_p": 0.1, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    **{"repetition_penalty": 10.0, "logit_bias": ((5, -100.0), (2**32 - 1, 0.1)), "logprobs": 20},
    **{"prompt_logprobs": 3, "grammar": '{"grammars": []}'},
    **{"allowed_token_ids": (7, 2**32 - 1), "logprob_token_ids": (9, 8)},
}


def request(**sampling: Any) -> Request:
    return Request(id="a", prompt=(1,), sampling=SamplingParams(**sampling), cache_root=bytes(16))


def put_on_wire(message: pb.Sampling, field: str, value: Any) -> None:
    """Set a field as a peer could that does not check it."""
    if field == "logit_bias":
        message.logit_bias.extend(pb.LogitBias(token=t, bias=b) for t, b in value)
    elif field.endswith("token_ids"):
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)


@pytest.mark.parametrize(
    "sampling", [{}, {"logprobs": 0}, FULL], ids=["defaults", "no top", "full"]
)
def test_sampling_survives_the_wire(sampling: dict[str, Any]) -> None:
    sent = request(**sampling)
    assert (
        request_from_wire(pb.Request.FromString(request_to_wire(sent).SerializeToString())) == sent
    )


def test_every_field_is_on_the_wire() -> None:
    assert set(FULL) == set(SamplingParams.__struct_fields__)
    assert set(FULL) == set(pb.Sampling.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", 100.1, "[0, 100], not 100.1"),
        ("temperature", -1.0, "[0, 100], not -1.0"),
        ("temperature", math.nan, "not nan"),
        ("seed", 2**63, "[0, 9223372036854775807], not 9223372036854775808"),
        ("top_p", 1.01, "(0, 1], not 1.01"),
        ("top_p", 0.0, "(0, 1], not 0.0"),
        ("top_p", math.nan, "not nan"),
        ("min_p", -0.1, "[0, 1], not -0.1"),
        ("min_p", math.nan, "not nan"),
        ("presence_penalty", 2.1, "[-2, 2], not 2.1"),
        ("frequency_penalty", -2.1, "[-2, 2], not -2.1"),
        ("repetition_penalty", 0.0, "(0, 10], not 0.0"),
        ("repetition_penalty", math.inf, "not inf"),
        ("top_k", 2**31, "[0, 2147483647], not 2147483648"),
        ("min_tokens", 17, "at most max_tokens (16), not 17"),
        ("logprobs", 2**19 + 1, "[0, 524288], not 524289"),
        ("logprobs", 2**15, "beside each of at most 15 output tokens, not 16"),
        ("logprob_token_ids", (5,), "only allowed with logprobs"),
        ("logprob_token_ids", tuple(range(129)), "at most 128 entries, not 129"),
        ("allowed_token_ids", tuple(range(2**14 + 1)), "at most 16384 entries, not 16385"),
        ("prompt_logprobs", 2**18 + 1, "[0, 262144], not 262145"),
        ("grammar", "x" * (2**18 + 1), "at most 262144 characters, not 262145"),
        ("logit_bias", ((5, 100.5),), "[-100, 100], not 100.5 for token 5"),
        ("logit_bias", ((5, math.nan),), "not nan for token 5"),
        ("logit_bias", ((5, 1.0), (5, 2.0)), "a token once"),
        ("logit_bias", tuple((t, 1.0) for t in range(1025)), "at most 1024 entries, not 1025"),
        ("stop_token_ids", tuple(range(65)), "at most 64 entries, not 65"),
    ],
)
def test_value_out_of_range_is_refused_with_field_and_value(
    field: str, value: Any, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(field) and says in str(caught.value)
    message = request_to_wire(request())
    put_on_wire(message.sampling, field, value)
    with pytest.raises(InvalidRequest) as refused:
        request_from_wire(message)
    assert (refused.value.param, str(refused.value)) == (field, str(caught.value))


@pytest.mark.parametrize("priority", [-101, 101])
def test_priority_out_of_range_is_refused(priority: int) -> None:
    message = request_to_wire(request())
    message.priority = priority
    with pytest.raises(InvalidRequest, match=f"\\[-100, 100\\], not {priority}"):
        request_from_wire(message)


def test_priority_survives_the_wire() -> None:
    message = request_to_wire(request())
    message.priority = -100
    assert request_from_wire(message).priority == -100


@pytest.mark.parametrize("waited_s", [-1e-9, 86_401.0, math.inf, math.nan])
def test_impossible_age_is_refused(waited_s: float) -> None:
    message = request_to_wire(request())
    message.waited_s = waited_s
    with pytest.raises(InvalidRequest, match=r"waited_s must be in \[0, 86400\], not"):
        request_from_wire(message)


def test_age_survives_the_wire_and_is_limited() -> None:
    aged = request(max_tokens=9).resumed([5], 12.5)
    assert request_from_wire(request_to_wire(aged)) == aged
    assert (aged.emitted, aged.waited_s) == ((5,), 12.5)
    assert request().resumed([], 1e9).waited_s == 86_400


def test_log_probabilities_survive_the_wire() -> None:
    sent = Logprobs(-0.5, 2, [7, 8], [-0.25, -0.5])
    blob = logprobs_to_wire(sent).SerializeToString()
    assert logprobs_from_wire(pb.Logprobs.FromString(blob)) == sent
