"""Log-probabilities of completions, echo, and which tokens are text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.generation.output_text import OutputText, PendingLogprobs
from router.openai.answers.formatter import MIN_LOGPROB, clamp_logprob
from router.text.vocabulary import Vocabulary
from tests.router.conftest import MODEL, Start, served
from tests.router.errors import check
from tests.router.fake_worker import expected, logprob_of, outputs, tokens_then_stop
from tests.router.http.api.test_stream import frames, text_of


async def test_the_shape(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "ab"]
    cluster = await start(outputs())
    choice = (await cluster.post(prompt=ids, max_tokens=3, logprobs=2)).json()["choices"][0]
    assert choice["text"] == "aba"
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "b", "a"]
    assert told["token_logprobs"] == [logprob_of(i) for i in [*ids, ids[0]]]
    assert told["text_offset"] == [0, 1, 2]
    assert told["top_logprobs"][0] == {"a": logprob_of(ids[0]), "b": logprob_of(ids[0]) - 1}


async def test_none_of_the_others(start: Start) -> None:
    cluster = await start(outputs())
    choice = (await cluster.post(prompt=[70], max_tokens=1, logprobs=0)).json()["choices"][0]
    [top] = choice["logprobs"]["top_logprobs"]
    assert list(top.values()) == [logprob_of(70)], "the token itself"


async def test_a_prompt_is_scored(start: Start, tokenizer: Tokenizer) -> None:
    """As evaluation harnesses ask."""
    cluster = await start(outputs())
    prompt = "hello über"
    ids = tokenizer.encode(prompt).ids
    response = await cluster.post(prompt=[prompt, ids], max_tokens=0, echo=True, logprobs=1)
    body = response.json()
    for choice in body["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == prompt
        assert told["token_logprobs"] == [None, *(logprob_of(i) for i in ids[1:])]
        assert told["top_logprobs"][0] is None
        assert len(told["top_logprobs"]) == len(told["text_offset"]) == len(ids)
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert prompt[at : at + len(token)] == token
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 2 * len(ids)


async def test_echo_with_output(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs(delay=0.001))
    ids = tokenizer.encode("é🦊").ids
    want = tokenizer.decode([*ids, *expected(ids, 9)])
    given: dict[str, Any] = {"prompt": ids, "max_tokens": 9, "echo": True, "logprobs": 0}
    whole = (await cluster.post(**given)).json()["choices"][0]
    async with served(cluster.app) as url:
        events = await frames(url, **given)
    assert whole["text"] == text_of(events) == want
    streamed: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for event in events[:-1]:
        for name, values in event["choices"][0]["logprobs"].items():
            streamed[name] += values
    assert streamed == whole["logprobs"], "none is lost, none comes twice"
    assert len(streamed["tokens"]) == len(ids) + 9


async def test_echo_alone_asks_the_worker_for_nothing(start: Start) -> None:
    cluster = await start(outputs())
    choice = (await cluster.post(prompt="hello", max_tokens=2, echo=True)).json()["choices"][0]
    assert choice["text"].startswith("hello") and choice["logprobs"] is None
    sampling = cluster.workers[0].requests[0].request.sampling
    assert not sampling.HasField("prompt_logprobs") and not sampling.HasField("logprobs")


async def test_prompt_logprobs_as_vllm_has_them(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    body = (await cluster.post(prompt=[70, 71], max_tokens=1, prompt_logprobs=1)).json()
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    name = tokenizer.decode([71])
    assert second == {"71": {"logprob": logprob_of(71), "rank": 1, "decoded_token": name}}


@pytest.mark.parametrize("given", [{}, {"echo": True, "logprobs": 2}, {"best_of": 4}])
async def test_one_choice_asks_about_the_prompt_and_all_show_it(
    start: Start, given: dict[str, Any]
) -> None:
    cluster = await start(outputs(delay=0.001))
    given = {"prompt": [[70, 71], [72, 73]], "max_tokens": 3, "n": 3, "prompt_logprobs": 1, **given}
    answer = await cluster.post(**given)
    choices = answer.json()["choices"]
    assert [list(c["prompt_logprobs"][1]) for c in choices] == [["71"]] * 3 + [["73"]] * 3
    if "echo" in given:
        tops = [c["logprobs"]["top_logprobs"][1] for c in choices]
        assert [len(top) for top in tops] == [2] * 6
    sent = [r.request.sampling for r in cluster.workers[0].requests]
    assert len(sent) == 2 * given.get("best_of", 3)
    assert [s.choice for s in sent if s.HasField("prompt_logprobs")] == [0, 0]


async def test_an_echo_of_many_choices_in_a_stream(start: Start) -> None:
    cluster = await start(outputs(delay=0.001))
    given: dict[str, Any] = {"prompt": [70, 71], "max_tokens": 4, "n": 4}
    async with served(cluster.app) as url:
        events = await frames(url, echo=True, logprobs=0, **given)
    tokens = Counter[int]()
    for event in events[:-1]:
        [choice] = event["choices"]
        tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert tokens == dict.fromkeys(range(4), 2 + 4)
    sent = [r.request.sampling for r in cluster.workers[0].requests]
    assert [s.choice for s in sent if s.HasField("prompt_logprobs")] == [0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt_logprobs": 20, "n": 32}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 32}, "logprobs"),
        ({"logprobs": 20, "echo": True, "prompt_logprobs": 20, "n": 5}, "prompt_logprobs"),
    ],
)
async def test_an_answer_may_not_be_made_of_log_probabilities(
    start: Start, given: dict[str, Any], field: str
) -> None:
    cluster = await start(outputs())
    answer = await cluster.post(prompt=[70] * 2000, max_tokens=1, **given)
    check(answer, 400, field, None, "at most 262144")
    assert not cluster.workers[0].requests
    few = {**given, "n": 1}
    assert (await cluster.post(prompt=[70] * 2000, max_tokens=1, **few)).status_code == 200


async def test_what_a_stop_string_may_be_is_not_told_early(
    start: Start, tokenizer: Tokenizer
) -> None:
    ids = [tokenizer.token_to_id(c) for c in "abcx"]
    cluster = await start(outputs(delay=0.005))
    async with served(cluster.app) as url:
        events = await frames(url, prompt=ids, max_tokens=7, logprobs=0, stop=["bcy", "zz"])
    seen = ""
    for event in events[:-1]:
        choice = event["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        seen += choice["text"]
    assert seen == "abcxabc"


async def test_tokens_by_their_ids(start: Start) -> None:
    cluster = await start(outputs())
    given = {"prompt": [70], "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    told = (await cluster.post(**given)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:70"]
    assert list(told["top_logprobs"][0]) == ["token_id:70"]


async def test_a_part_of_a_character(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "ðŁ¦Ĭ"]
    cluster = await start(outputs())
    choice = (await cluster.post(prompt=ids, max_tokens=4, logprobs=0)).json()["choices"][0]
    assert choice["text"] == "🦊"
    assert choice["logprobs"]["tokens"][0] == "bytes:\\xf0"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        (["ð", "a"], [0, 1]),  # what was begun becomes a sign of its own
        (["ð", "Ł", "a", "b"], [0, 0, 1, 2]),
        (["ð", "ð", "Ł", "¦", "Ĭ"], [0, 1, 1, 1, 1]),
        (["ï", "¿", "½", "a"], [0, 0, 0, 1]),  # the sign itself, as a model may write it
    ],
)
async def test_a_character_that_stays_incomplete(
    start: Start, tokenizer: Tokenizer, pieces: list[str], offsets: list[int]
) -> None:
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    cluster = await start(outputs())
    answer = await cluster.post(prompt=ids, max_tokens=len(ids), logprobs=0)
    choice = answer.json()["choices"][0]
    assert choice["text"] == tokenizer.decode(ids)
    assert choice["logprobs"]["text_offset"] == offsets


# ---- which tokens are text ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stop_token_ids": True}, "hell"),
        ({"stop_token_ids": True, "include_stop_str_in_output": True}, "hello"),
        ({}, "hello"),
    ],
)
async def test_a_stop_token_that_is_text(
    start: Start, tokenizer: Tokenizer, given: dict[str, Any], text: str
) -> None:
    ids = [tokenizer.token_to_id(c) for c in "hello"]
    if "stop_token_ids" in given:
        given = {**given, "stop_token_ids": [ids[-1]]}
    cluster = await start(tokens_then_stop(ids))
    body = (await cluster.post(prompt="x", logprobs=0, **given)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert body["usage"]["completion_tokens"] == 5
    assert choice["logprobs"]["tokens"] == list("hello"), "it was drawn, and counts"


async def test_special_tokens_in_the_text(start: Start, tokenizer: Tokenizer) -> None:
    ids = [0, tokenizer.token_to_id("a"), 0]
    cluster = await start(outputs())
    plain = await cluster.post(prompt=ids, max_tokens=3)
    shown = await cluster.post(prompt=ids, max_tokens=3, skip_special_tokens=False)
    assert plain.json()["choices"][0]["text"] == "a"
    assert shown.json()["choices"][0]["text"] == "<|eos|>a<|eos|>"


async def test_min_tokens_and_stop_strings(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "abc"]
    cluster = await start(outputs())
    given = {"prompt": ids, "max_tokens": 12, "stop": "bc"}
    assert (await cluster.post(**given)).json()["choices"][0]["text"] == "a"
    held = (await cluster.post(min_tokens=5, **given)).json()["choices"][0]
    assert held["text"] == "abcabca", "what begins before min_tokens is no stop string"
    kept = (await cluster.post(include_stop_str_in_output=True, **given)).json()["choices"][0]
    assert kept["text"] == "abc"


async def test_the_end_of_a_prompt_is_kept(start: Start) -> None:
    cluster = await start(outputs())
    body = (await cluster.post(prompt=[5, 6, 7], truncate_prompt_tokens=2, max_tokens=1)).json()
    assert body["usage"]["prompt_tokens"] == 2
    assert list(cluster.workers[0].requests[0].request.prompt) == [6, 7]


async def test_the_openai_client_gets_log_probabilities(start: Start) -> None:
    cluster = await start(outputs(delay=0.001))
    async with served(cluster.app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=3, logprobs=2, n=2, best_of=2
        )
        assert len(whole.choices) == 4
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == 3
        await client.close()


# ---- pure -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


@given(ids=st.lists(st.integers(0, 340), max_size=40), late=st.integers(0, 3))
def test_every_token_goes_once_and_with_all_of_its_text(
    vocabulary: Vocabulary, ids: list[int], late: int
) -> None:
    """``late``: characters that are held back."""
    text = OutputText(vocabulary.detokenizer(), tracked=True)
    waiting, released, size = PendingLogprobs(), [], 0
    empty = [vocabulary.is_textless(i) for i in range(341)]
    for token in ids:
        size += len(text.push([token]).text)
        waiting.add(token, None, text.spans.pop(), textless=empty[token])
        released += waiting.take_sent(max(0, size - late))
        for shown in released:
            assert empty[shown.token] or shown.offset < size - late
    released += waiting.take_all()
    assert [shown.token for shown in released] == ids
    assert waiting.take_all() == []


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (-1.5, -1.5),
        (float("-inf"), MIN_LOGPROB),
        (float("nan"), MIN_LOGPROB),
        (0.0, 0.0),
        (1e-7, 0.0),
    ],
)
def test_json_has_no_infinity(value: float, sent: float) -> None:
    assert clamp_logprob(value) == sent
