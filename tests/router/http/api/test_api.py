"""The HTTP face of the router, over fake workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from protocol.block_keys import cache_root
from protocol.registry.directory import ModelInfo
from protocol.requests import request_from_wire
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb
from router.openai.prompts.prompt_encoder import LONG_PROMPT
from router.settings import RouterSettings
from tests.router.conftest import MODEL, Start, running, until
from tests.router.fake_worker import expected, outputs, silent, tokens_then_stop


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error  # type: ignore[no-any-return]


async def test_a_completion(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs(cached=2))
    response = await cluster.post(prompt="hello 🦊", max_tokens=20, return_token_ids=True)
    assert response.status_code == 200
    body = response.json()
    prompt = tokenizer.encode("hello 🦊").ids
    ids = expected(prompt, 20)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "text": tokenizer.decode(ids),
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": ids,
            "prompt_token_ids": prompt,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 20,
        "total_tokens": len(prompt) + 20,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_token_ids_in_and_none_out_unless_asked(start: Start) -> None:
    cluster = await start(outputs())
    choice = (await cluster.post(prompt=[5, 6, 7])).json()["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert list(cluster.workers[0].requests[0].request.prompt) == [5, 6, 7]


async def test_what_the_worker_gets(start: Start, settings: RouterSettings) -> None:
    cluster = await start(outputs())
    await cluster.post(
        prompt=[5], max_tokens=3, temperature=0.5, top_p=0.25, seed=-1, ignore_eos=True
    )
    await cluster.post(prompt=[5], max_tokens=3)
    await cluster.post(prompt=[5], max_tokens=3)
    first, second, third = (s.request for s in cluster.workers[0].requests)
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 3)
    assert (sampling.seed, sampling.ignore_eos) == (2**63 - 1, True)
    assert first.cache_root == cache_root(settings.secret, "default", "f" * 32, "exact")
    assert second.sampling.seed != third.sampling.seed, "each request draws a seed of its own"
    assert (second.sampling.temperature, second.sampling.ignore_eos) == (1.0, False)


async def test_sampling_reaches_the_worker(start: Start) -> None:
    cluster = await start(outputs())
    given: dict[str, Any] = {
        **{"top_k": 7, "min_p": 0.125, "presence_penalty": -0.5, "frequency_penalty": 0.25},
        **{"repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [3, 4]},
    }
    bias = {"5": -100, "6": 0.5}
    await cluster.post(prompt=[5], max_tokens=3, logit_bias=bias, **given)
    await cluster.post(prompt=[5], max_tokens=3, top_k=-1)
    full, plain = (request_from_wire(s.request).sampling for s in cluster.workers[0].requests)
    for name, value in given.items():
        assert getattr(full, name) == (tuple(value) if isinstance(value, list) else value)
    assert full.logit_bias == ((5, -100.0), (6, 0.5))
    assert plain == SamplingParams(max_tokens=3, seed=plain.seed)


@pytest.mark.parametrize(
    "field", [{"logit_bias": {"99999": 1}}, {"stop_token_ids": [99999]}, {"prompt": [99999]}]
)
async def test_a_token_id_outside_the_vocabulary(start: Start, field: dict[str, Any]) -> None:
    cluster = await start(outputs())
    response = await cluster.post(**{"prompt": [5], **field})
    assert response.status_code == 400
    error = response.json()["error"]
    assert [error["param"]] == list(field) and "99999" in error["message"]


async def test_a_stop_string_across_tokens(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "abcdef"]
    cluster = await start(outputs(together=6, delay=0.01))
    response = await cluster.post(
        prompt=ids, max_tokens=600, stop=["xx", "cd"], return_token_ids=True
    )
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["token_ids"] == ids[:4]
    assert response.json()["usage"]["completion_tokens"] == 4
    [submit] = cluster.workers[0].requests
    await until(lambda: cluster.workers[0].cancelled == [submit.request.id])


async def test_a_stop_token_is_counted_and_says_nothing(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello").ids
    cluster = await start(tokens_then_stop([*ids, 0]))
    body = (await cluster.post(prompt="x")).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hello", "stop")
    assert body["usage"]["completion_tokens"] == len(ids) + 1


async def test_a_worker_that_overruns_is_cut(start: Start) -> None:
    cluster = await start(tokens_then_stop(range(1, 100)))
    body = (await cluster.post(prompt="x", max_tokens=7)).json()
    assert body["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("changes", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"prompt": [5, 100_000]}, 400, "prompt", None),
        ({"prompt": [5] * 4090, "max_tokens": 7}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": [5] * 4096, "max_tokens": 1}, 400, "prompt", "context_length_exceeded"),
        ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ({"stream_options": {"usage": 1}}, 400, "stream_options.usage", "unknown_parameter"),
    ],
)
async def test_refusals(
    start: Start, changes: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    cluster = await start(outputs())
    response = await cluster.post(**{"prompt": "hi", **changes})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert not cluster.workers[0].requests


async def test_context_length_is_inclusive_and_the_message_has_the_numbers(start: Start) -> None:
    cluster = await start(outputs(together=100))
    assert (await cluster.post(prompt=[5] * 4090, max_tokens=6)).status_code == 200
    message = error_of(await cluster.post(prompt=[5] * 4090, max_tokens=7))["message"]
    assert all(number in message for number in ("4096", "4090", "7"))


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"a=b", "application/x-www-form-urlencoded", 415),
        (b"x" * 200_000, "application/json", 413),
    ],
)
async def test_bodies_that_are_not_a_json_object(
    start: Start, content: bytes, kind: str, status: int
) -> None:
    cluster = await start(max_body_bytes=150_000)
    response = await cluster.client.post(
        "/v1/completions", content=content, headers={"content-type": kind}
    )
    assert response.status_code == status
    assert error_of(response)["message"]


async def test_a_large_body_without_a_length_is_refused_as_well(start: Start) -> None:
    cluster = await start(max_body_bytes=1000)

    async def parts() -> Any:
        for _ in range(20):
            yield b"x" * 100

    kind = {"content-type": "application/json"}
    response = await cluster.client.post("/v1/completions", content=parts(), headers=kind)
    assert response.status_code == 413


async def test_unknown_paths_and_methods(start: Start) -> None:
    cluster = await start()
    missing = await cluster.client.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = await cluster.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["code"] == "method_not_allowed"


async def test_models(start: Start) -> None:
    cluster = await start(outputs())
    listed = (await cluster.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 4096)
    assert (await cluster.client.get(f"/v1/models/{MODEL}")).json() == card
    other = await cluster.client.get("/v1/models/some/other")
    assert (other.status_code, error_of(other)["code"]) == (404, "model_not_found")


async def test_without_a_worker(start: Start) -> None:
    cluster = await start()
    assert (await cluster.client.get("/health")).status_code == 200
    response = await cluster.client.get("/ready")
    assert response.status_code == 503
    assert MODEL in error_of(response)["message"]
    response = await cluster.post(prompt="hi")
    assert (response.status_code, error_of(response)["code"]) == (503, "no_worker")
    assert response.headers["retry-after"] == "1"
    await cluster.add(outputs())
    await cluster.attached(1)
    assert (await cluster.client.get("/ready")).status_code == 200


async def test_the_first_token_has_a_deadline(start: Start) -> None:
    cluster = await start(silent, first_token_timeout_s=0.1)
    response = await cluster.post(prompt="hi")
    assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
    await until(lambda: len(cluster.workers[0].cancelled) == 1)


async def test_every_further_token_has_a_deadline(start: Start) -> None:
    async def stops(request: pb.Request) -> AsyncIterator[pb.Output]:
        yield pb.Output(id=request.id, tokens=[5])
        await asyncio.Event().wait()

    cluster = await start(stops, next_token_timeout_s=0.2)
    response = await cluster.post(prompt="hi", max_tokens=1000)
    assert response.status_code == 504
    assert error_of(response)["message"] == "no further token was generated within 0.2 s"
    await until(lambda: len(cluster.workers[0].cancelled) == 1)


async def test_a_request_that_makes_progress_may_take_long(start: Start) -> None:
    cluster = await start(outputs(delay=0.02), next_token_timeout_s=0.2, first_token_timeout_s=0.2)
    response = await cluster.post(prompt="hi", max_tokens=40)
    assert response.json()["usage"]["completion_tokens"] == 40


async def test_request_ids(start: Start) -> None:
    cluster = await start()
    ids = {(await cluster.client.get("/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    for given, kept in (("my-id", True), ("bad id!", False)):
        response = await cluster.client.get("/health", headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is kept


async def test_long_prompts_are_tokenized_the_same(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    text = "def hello(self): return 1\n" * 400
    assert len(text) > LONG_PROMPT
    response = await cluster.post(prompt=text, max_tokens=1, return_token_ids=True)
    ids = tokenizer.encode(text).ids
    assert response.json()["choices"][0]["prompt_token_ids"] == ids


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(start: Start) -> None:
    cluster = await start(outputs())
    before = time.process_time()
    response = await cluster.post(prompt="a" * ((8 << 20) - 1024))
    assert time.process_time() - before < 1.0, "8 MiB take some 5 s to tokenize"
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "prompt" and "at least" in error["message"]


async def test_two_routers_in_one_process_share_nothing(
    settings: RouterSettings, model_info: ModelInfo
) -> None:
    async with (
        running(settings, model_info, outputs()) as one,
        running(settings, model_info) as other,
    ):
        await one.post(prompt="hi")
        assert (await other.post(prompt="hi")).status_code == 503
        page = (await other.client.get("/metrics")).text
        assert 'baton_requests_total{model="tiny",role="router",status="ok"} 0.0' in page
