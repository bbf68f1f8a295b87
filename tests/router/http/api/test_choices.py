"""Several choices, several prompts: one request over many generations."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Start, served, until
from tests.router.fake_worker import expected, logprob_of, outputs, silent
from tests.router.http.api.test_stream import frames, hang_up, load_of

PROMPT = [40, 41, 42, 43, 44]


async def test_choices_are_what_single_requests_get(start: Start) -> None:
    cluster = await start(outputs(cached=2))
    given: dict[str, Any] = {"max_tokens": 7, "seed": 5, "return_token_ids": True}
    body = (await cluster.post(prompt=PROMPT, n=3, **given)).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["token_ids"] for c in body["choices"]] == [expected(PROMPT, 7, i) for i in range(3)]
    assert body["usage"]["prompt_tokens"] == 5, "a prompt counts once"
    assert body["usage"]["completion_tokens"] == 21
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    requests = [submit.request for submit in cluster.workers[0].requests]
    assert len({request.id for request in requests}) == 3
    assert {request.sampling.seed for request in requests} == {5}
    assert sorted(request.sampling.choice for request in requests) == [0, 1, 2]


async def test_a_prompt_among_others_gets_what_it_gets_alone(start: Start) -> None:
    cluster = await start(outputs())
    given: dict[str, Any] = {"max_tokens": 4, "seed": 9, "n": 2, "return_token_ids": True}
    together = (await cluster.post(prompt=["ab", PROMPT], **given)).json()
    cluster.workers[0].requests.clear()
    alone = (await cluster.post(prompt=[PROMPT], **given)).json()
    assert [c["index"] for c in together["choices"]] == [0, 1, 2, 3]
    for mine, other in zip(together["choices"][2:], alone["choices"], strict=True):
        assert mine["token_ids"] == other["token_ids"]
        assert mine["prompt_token_ids"] == PROMPT
    assert together["usage"]["prompt_tokens"] == len(together["choices"][0]["prompt_token_ids"]) + 5


async def test_the_best_by_log_probability(start: Start) -> None:
    cluster = await start(outputs())
    body = (
        await cluster.post(prompt=PROMPT, n=2, best_of=5, max_tokens=2, return_token_ids=True)
    ).json()
    candidates = [expected(PROMPT, 2, i) for i in range(5)]
    ranked = sorted(candidates, key=lambda ids: -sum(logprob_of(t) for t in ids))
    assert [c["token_ids"] for c in body["choices"]] == ranked[:2]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 10, "those that were not the best count, too"
    assert all(c["logprobs"] is None for c in body["choices"]), "nobody asked for them"


async def test_a_stream_of_choices(start: Start) -> None:
    cluster = await start(outputs(delay=0.002))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with served(cluster.app) as url:
        events = await frames(
            url,
            **{"prompt": PROMPT, "n": 3, "max_tokens": 6, "return_token_ids": True},
            stream_options=options,
        )
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 18
    got: dict[int, list[int]] = {}
    finished = []
    so_far = 0
    for event in events:
        [choice] = event["choices"]
        assert ("prompt_token_ids" in choice) == (choice["index"] not in got)
        got.setdefault(choice["index"], []).extend(choice["token_ids"])
        finished += [choice["index"]] if choice["finish_reason"] else []
        assert event["usage"]["completion_tokens"] >= so_far
        so_far = event["usage"]["completion_tokens"]
    assert got == {i: expected(PROMPT, 6, i) for i in range(3)}
    assert sorted(finished) == [0, 1, 2]


async def test_one_that_fails_fails_all(start: Start) -> None:
    cluster = await start(outputs())

    async def one_fails(request: pb.Request) -> Any:
        if request.sampling.choice == 1:
            yield pb.Output(id=request.id, finish=pb.FINISH_ERROR, error="boom")
        await asyncio.Event().wait()

    cluster.workers[0].script = one_fails
    response = await cluster.post(prompt=PROMPT, n=3, max_tokens=5)
    assert response.status_code == 500
    assert "boom" in response.json()["error"]["message"]
    await until(lambda: load_of(cluster) == 0)
    await until(lambda: len(cluster.workers[0].cancelled) == 2)


async def test_a_client_that_goes_takes_all_along(start: Start) -> None:
    cluster = await start(silent)
    body = {"model": MODEL, "prompt": PROMPT, "n": 4, "max_tokens": 50}
    async with served(cluster.app) as url:
        await hang_up(url, after_bytes=False, stream=True)
        await until(lambda: len(cluster.workers[0].cancelled) == 1)
        task = asyncio.create_task(cluster.client.post("/v1/completions", json=body))
        await until(lambda: len(cluster.workers[0].requests) == 5)
        assert cluster.app.state.router.admission.inside.total() == 4, "each choice counts"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(cluster.workers[0].cancelled) == 5)
        assert load_of(cluster) == 0


async def test_more_than_a_tenant_may_have_is_refused_at_once(start: Start) -> None:
    cluster = await start(outputs(), max_requests=3)
    response = await cluster.post(prompt=PROMPT, n=4)
    assert response.status_code == 400
    assert "limits.max_requests" in response.json()["error"]["message"]
    assert not cluster.workers[0].requests
    assert (await cluster.post(prompt=PROMPT, n=3)).status_code == 200


async def test_each_stops_at_its_own_stop_string(start: Start, tokenizer: Any) -> None:
    ids = [tokenizer.token_to_id(c) for c in "abcd"]
    cluster = await start(outputs(delay=0.001))
    body = (await cluster.post(prompt=ids, n=2, max_tokens=400, stop="da")).json()
    assert [c["text"] for c in body["choices"]] == ["abc", "bc"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop"]
    await until(lambda: len(cluster.workers[0].cancelled) == 2)


async def test_explanations_name_the_choice(start: Start) -> None:
    cluster = await start(outputs())
    response = await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "n": 2, "max_tokens": 2},
        headers={"x-baton-explain": "1"},
    )
    assert [tried["choice"] for tried in response.json()["baton"]["attempts"]] == [0, 1]


async def test_a_whole_answer_has_no_slow_client(start: Start) -> None:
    """However quickly a worker brings it."""
    cluster = await start(outputs(together=100), client_buffer_tokens=50)
    body = (await cluster.post(prompt=PROMPT, n=3, max_tokens=900)).json()
    assert body["usage"]["completion_tokens"] == 2700


async def test_a_session_key_is_remembered_with_its_workers(start: Start) -> None:
    cluster = await start(outputs())
    [worker], state = cluster.workers, cluster.app.state.router
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    for extra, headers in (({"prompt_cache_key": "a"}, {}), ({}, {"X-Session-Id": "a"}), ({}, {})):
        answer = await cluster.client.post("/v1/completions", json=body | extra, headers=headers)
        assert answer.status_code == 200
    assert list(state.estimates.sessions._workers.values()) == [(worker.instance, worker.instance)]
