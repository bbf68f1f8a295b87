"""A completion's body to its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.directory import ModelInfo
from router import tokens
from router.api.completion_body import CompletionBody
from router.api.completion_form import CompletionForm, CompletionShows
from router.api.form import Form, Head, Naming
from router.errors import invalid
from router.plan import Plan, Prompt, manner_of
from router.room import Room
from router.state import RouterState

_ROOM = Room("prompt", "max_tokens")

MAX_PROMPT_SCORES = 1 << 18
"""Log-probabilities of prompts in an answer: some 20 MB of JSON."""


async def plan_completion(
    state: RouterState, body: CompletionBody, model: ModelInfo, tenant: str
) -> Plan:
    """Raises ApiError (400) for prompts that do not fit the model."""
    prompts = [await _ids(state, body, prompt, model) for prompt in body.prompt]
    _check_scores(body, prompts)
    output = await state.formats.plan(body, tenant)
    tracked = body.logprobs is not None
    shows = CompletionShows(tracked, body.return_token_ids, body.prompt_logprobs)
    naming = Naming(state.vocabulary, body.return_tokens_as_token_ids)
    scored_only = body.max_tokens == 0

    def form(head: Head, of_choices: list[Prompt]) -> Form:
        return CompletionForm(head, naming, shows, of_choices)

    return Plan(
        prefix="cmpl",
        prompts=prompts,
        max_tokens=body.max_tokens,
        form=form,
        manner=manner_of(state, body, tracked=tracked, echo=body.echo, scored_only=scored_only),
        candidates=body.candidates,
        logprobs=_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
        grammar=output.grammar,
    )


def _logprobs(body: CompletionBody) -> int | None:
    """The best of many are found by their log-probabilities, whether or not they are shown."""
    if body.logprobs is None and body.candidates > body.n:
        return 0
    return body.logprobs


def _prompt_logprobs(body: CompletionBody) -> int | None:
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in wanted if count is not None), default=None)


def _check_scores(body: CompletionBody, prompts: list[Prompt]) -> None:
    """Raises ApiError (400) for an answer with too many log-probabilities of prompts."""
    of_echo = body.logprobs if body.echo else None
    each = sum(count + 1 for count in (body.prompt_logprobs, of_echo) if count is not None)
    total = each * body.n * sum(map(len, prompts))
    if total > MAX_PROMPT_SCORES:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise invalid(
            f"{field}: the answer would hold {total} log-probabilities of prompts (tokens of all"
            f" prompts times n times {each}); at most {MAX_PROMPT_SCORES} are given",
            field,
        )


async def _ids(
    state: RouterState, body: CompletionBody, prompt: str | list[int], model: ModelInfo
) -> Prompt:
    kept = body.truncate_prompt_tokens

    def room(count: int) -> None:
        _ROOM.check(min(count, kept or count), max(body.max_tokens, 1), model)

    ids = prompt if isinstance(prompt, list) else await _encoded(state, body, prompt, room)
    room(len(ids))
    if len(body.prompt) > 1:
        await asyncio.sleep(0)  # many prompts take a while; streams go on
    return tuple(ids if kept is None else ids[-kept:])


async def _encoded(
    state: RouterState, body: CompletionBody, prompt: str, room: Callable[[int], None]
) -> list[int]:
    try:
        return await tokens.encode(
            state.vocabulary.tokenizer, prompt, special=body.add_special_tokens, room=room
        )
    except UnicodeEncodeError:
        raise invalid("prompt must be text, but holds half of a surrogate pair", "prompt") from None
