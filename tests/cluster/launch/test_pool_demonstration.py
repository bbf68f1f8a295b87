import pytest

from cluster.launch.pool_demonstration import describe_steps

TIMES = {"first_token": 0.25, "decode_started": 0.3, "finished": 0.5}


def answer(prefill: str | None, times: dict[str, float]) -> dict[str, object]:
    attempt = {"chosen": {"decode": "d" * 32, "prefill": prefill}}
    return {
        "usage": {"prompt_tokens": 480, "completion_tokens": 16},
        "baton": {"attempts": [attempt], "timeline": [times]},
    }


def test_a_prompt_that_took_both_pools_has_the_times_of_its_steps() -> None:
    text = describe_steps(answer("p" * 32, TIMES))
    assert "480 tokens" in text and "prefill on worker pppppp 250 ms" in text
    assert "hand-over of its KV 50 ms" in text
    assert text.endswith("decode on worker dddddd 16 tokens in 250 ms")


def test_a_prompt_that_the_decode_worker_computed_says_so() -> None:
    text = describe_steps(answer(None, {"first_token": 0.25, "finished": 0.5}))
    assert "prefill and decode on worker dddddd: 250 ms" in text


def test_an_answer_without_a_timeline_is_an_error() -> None:
    with pytest.raises(KeyError):
        describe_steps({"usage": {}})
