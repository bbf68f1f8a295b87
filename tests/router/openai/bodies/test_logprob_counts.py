"""Numbers of log-probabilities in answers, vLLM's parameters about them, and their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from router.common.errors import ApiError
from router.openai.bodies.chat_body import parse_chat
from router.openai.bodies.completion_body import parse_completion
from router.openai.bodies.logprob_counts import (
    MAX_STREAMED_LOGPROBS,
    LogprobCounts,
    chat_logprob_counts,
    completion_logprob_counts,
)
from tests.router.conftest import Start
from tests.router.fake_worker import logprob_of, outputs

VOCAB = 151_936
MESSAGES = [{"role": "user", "content": "hi"}]


def of_chat(prompt: int = 9, max_tokens: int = 1, **body: Any) -> LogprobCounts:
    body = {"model": "m", "messages": MESSAGES, **body}
    return chat_logprob_counts(parse_chat(body), [5] * prompt, max_tokens, VOCAB)


def of_completion(prompt: int = 9, **body: Any) -> LogprobCounts:
    body = {"model": "m", "prompt": "hi", "max_tokens": 1, **body}
    return completion_logprob_counts(parse_completion(body), [[5] * prompt], VOCAB)


def test_minus_one_is_the_whole_vocabulary() -> None:
    assert of_chat(logprobs=True, top_logprobs=-1).output == VOCAB
    assert of_chat(prompt=1, prompt_logprobs=-1).prompt == VOCAB
    assert of_completion(logprobs=-1).output == VOCAB
    assert of_completion(prompt=1, prompt_logprobs=-1).of_prompts == VOCAB
    assert of_completion(prompt=1, logprobs=-1, echo=True).of_prompts == VOCAB
    assert of_chat() == of_chat(top_logprobs=0) == LogprobCounts(None, None, None)
    assert of_completion(best_of=2).output == 0, "the best is chosen by them"


@pytest.mark.parametrize(
    ("asked", "field", "says"),
    [
        ({"logprobs": True, "top_logprobs": -1, "max_tokens": 4}, "top_logprobs", "607748"),
        ({"logprobs": True, "top_logprobs": -1, "n": 4}, "top_logprobs", "4 choices of up to 1"),
        (
            {"logprobs": True, "logprob_token_ids": list(range(100)), "max_tokens": 5200},
            "logprob_token_ids",
            "525200 log-probabilities (1 choices of up to 5200 tokens times 101); at most 524288",
        ),
        ({"prompt": 2, "prompt_logprobs": -1}, "prompt_logprobs", "303874"),
        ({"prompt": 12_484, "prompt_logprobs": 20}, "prompt_logprobs", "at most 262144"),
        (
            {"logprobs": True, "top_logprobs": -1, "stream": True},
            "top_logprobs",
            f"stream=true, where at most {MAX_STREAMED_LOGPROBS}",
        ),
    ],
)
def test_an_answer_with_too_many_is_refused(asked: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        of_chat(**asked)
    assert caught.value.param == field and says in caught.value.message


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"logprobs": -1, "max_tokens": 4}, "logprobs"),
        ({"logprobs": -1, "best_of": 4, "n": 1}, "logprobs"),
        ({"prompt": 2, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": 2, "logprobs": -1, "echo": True, "max_tokens": 0}, "logprobs"),
    ],
)
def test_a_completion_with_too_many_is_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        of_completion(**asked)
    assert caught.value.param == field


def test_few_beside_each_token_are_not_bounded() -> None:
    asked: dict[str, Any] = {"logprobs": True, "logprob_token_ids": list(range(20)), "n": 64}
    assert of_chat(max_tokens=100_000, **asked).output == 0
    assert of_chat(max_tokens=100_000, logprobs=True, top_logprobs=20).output == 20


def test_a_stream_may_ask_for_none_beside_prompt_tokens() -> None:
    """As with vLLM, where 0 in a stream has no effect."""
    assert of_chat(stream=True, prompt_logprobs=0).prompt is None
    assert of_completion(stream=True, prompt_logprobs=0).prompt is None
    for count in (1, -1):
        for asking in (of_chat, of_completion):
            with pytest.raises(ApiError, match="stream=true"):
                asking(stream=True, prompt_logprobs=count)


async def test_a_chat_shows_its_prompt(start: Start) -> None:
    cluster = await start(outputs())
    response = await cluster.chat("hi", max_tokens=2, prompt_logprobs=1, n=2)
    body = response.json()
    prompt = list(cluster.workers[0].requests[0].request.prompt)
    first, *rest = body["prompt_logprobs"]
    assert first is None and len(rest) == len(prompt) - 1
    for token, row in zip(prompt[1:], rest, strict=True):
        assert row[str(token)]["logprob"] == logprob_of(token) and row[str(token)]["rank"] == 1
    assert "prompt_logprobs" not in (await cluster.chat("hi", max_tokens=2)).json()
    asked = [
        each.request.sampling.HasField("prompt_logprobs") for each in cluster.workers[0].requests
    ]
    assert asked == [True, False, False], "one choice asks for all"


async def test_a_chat_shows_the_whole_vocabulary(start: Start) -> None:
    cluster = await start(outputs())
    response = await cluster.chat("hi", max_tokens=2, logprobs=True, top_logprobs=-1)
    content = response.json()["choices"][0]["logprobs"]["content"]
    vocabulary = cluster.model.vocab_size
    assert [len(token["top_logprobs"]) for token in content] == [vocabulary] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_wanted_tokens_are_shown_beside_the_drawn_one(start: Start, stream: bool) -> None:
    cluster = await start(outputs())
    asked = {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [9, 200, 9]}
    asked |= {"allowed_token_ids": [42, 42, 7], "return_tokens_as_token_ids": True}
    response = await cluster.chat("hi", max_tokens=1, stream=stream, **asked)
    assert response.status_code == 200, response.text
    sampling = cluster.workers[0].requests[0].request.sampling
    assert list(sampling.allowed_token_ids) == [42, 7]
    assert list(sampling.logprob_token_ids) == [9, 200]
    drawn = cluster.workers[0].requests[0].request.prompt[0]
    for token in (drawn, 9, 200):
        assert f'"token_id:{token}"' in response.text
    if not stream:
        [token] = response.json()["choices"][0]["logprobs"]["content"]
        assert len(token["top_logprobs"]) == 3


async def test_wanted_tokens_of_a_completion(start: Start) -> None:
    cluster = await start(outputs())
    response = await cluster.post(prompt=[70], max_tokens=1, logprobs=5, logprob_token_ids=[72])
    told = response.json()["choices"][0]["logprobs"]
    assert [list(top.values()) for top in told["top_logprobs"]] == [
        [logprob_of(70), logprob_of(70) - 1]
    ]
