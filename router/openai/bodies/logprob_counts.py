"""How many log-probabilities a body asks for, and the bounds on those of one answer.

``router.http.generation_plan`` asks once the prompts are known. -1 stands for the whole vocabulary,
as in vLLM; the workers get its size instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.sampling_params import MAX_LOGPROBS, MAX_OUTPUT_LOGPROBS, MAX_PROMPT_LOGPROBS
from router.common.errors import invalid
from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.completion_body import CompletionBody
from router.openai.bodies.generation_body import GenerationBody

MAX_STREAMED_LOGPROBS = 1 << 14
"""Tokens beside one token of a stream: the chunk takes some 30 ms, in which no other stream gets
anything."""


class LogprobCounts(NamedTuple):
    """Numbers of tokens that are reported beside each token of an answer; None: no report."""

    output: int | None  # most likely tokens beside each output token
    echoed: int | None  # beside each token of an echoed prompt
    prompt: int | None  # beside each prompt token, in ``prompt_logprobs`` of the answer

    @property
    def of_prompts(self) -> int | None:
        """Return what workers are asked for beside each prompt token."""
        return max((n for n in (self.echoed, self.prompt) if n is not None), default=None)


def completion_logprob_counts(
    body: CompletionBody, prompts: Sequence[Sequence[int]], vocabulary: int
) -> LogprobCounts:
    """Return the counts for a vocabulary of so many tokens. Raises ApiError (400) for an answer
    with too many log-probabilities."""
    output = _resolve(body.logprobs, vocabulary)
    counts = LogprobCounts(output, output if body.echo else None, _prompt_count(body, vocabulary))
    each = sum(n + 1 for n in (counts.echoed, counts.prompt) if n is not None)
    field = "logprobs" if counts.prompt is None else "prompt_logprobs"
    _check_prompts(each * body.n, sum(map(len, prompts)), field)
    _check_outputs(body, counts, body.max_tokens, "logprobs")
    if output is None and body.candidates > body.n:
        # The best candidates are found by log-probabilities that need not be shown.
        counts = counts._replace(output=0)
    return counts


def chat_logprob_counts(
    body: ChatBody, prompt: Sequence[int], max_tokens: int, vocabulary: int
) -> LogprobCounts:
    """Return the counts for a vocabulary of so many tokens, where each choice has ``max_tokens`` or
    fewer. Raises ApiError (400) for an answer with too many log-probabilities."""
    output = _resolve(body.top_logprobs or 0, vocabulary) if body.logprobs else None
    counts = LogprobCounts(output, None, _prompt_count(body, vocabulary))
    if counts.prompt is not None:
        _check_prompts(counts.prompt + 1, len(prompt), "prompt_logprobs")
    _check_outputs(body, counts, max_tokens, "top_logprobs")
    return counts


def _resolve(count: int | None, vocabulary: int) -> int | None:
    return vocabulary if count == -1 else count


def _prompt_count(body: ChatBody | CompletionBody, vocabulary: int) -> int | None:
    """A stream does not show them: it may ask for 0 tokens beside each, as with vLLM."""
    return None if body.stream else _resolve(body.prompt_logprobs, vocabulary)


def _check_prompts(each: int, tokens: int, field: str) -> None:
    if each * tokens > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"{field}: the answer would hold {each * tokens} log-probabilities of prompts ({tokens}"
            f" tokens of prompts times {each}); at most {MAX_PROMPT_LOGPROBS} are given",
            field,
        )


def _check_outputs(body: GenerationBody, counts: LogprobCounts, max_tokens: int, top: str) -> None:
    """``top``: the field with the number of most likely tokens."""
    wanted = len(body.logprob_token_ids)
    count, field = (wanted, "logprob_token_ids") if wanted else (counts.output or 0, top)
    if count <= MAX_LOGPROBS:
        return
    total = (count + 1) * max_tokens * body.generations
    if total > MAX_OUTPUT_LOGPROBS:
        raise invalid(
            f"{field}: the answer would hold {total} log-probabilities ({body.generations} choices"
            f" of up to {max_tokens} tokens times {count + 1}); at most {MAX_OUTPUT_LOGPROBS} are"
            " given",
            field,
        )
    if body.stream and count > MAX_STREAMED_LOGPROBS:
        raise invalid(
            f"{field}: {count} log-probabilities beside each token are not supported with"
            f" stream=true, where at most {MAX_STREAMED_LOGPROBS} are given",
            field,
        )
