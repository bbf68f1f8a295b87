"""A completion's body to its plan."""

from __future__ import annotations

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


async def plan_completion(
    state: RouterState, body: CompletionBody, model: ModelInfo, tenant: str
) -> Plan:
    """Raises ApiError (400) for prompts that do not fit the model."""
    prompts = [await _ids(state, body, prompt) for prompt in body.prompt]
    for prompt in prompts:
        _ROOM.check(len(prompt), max(body.max_tokens, 1), model)
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


async def _ids(state: RouterState, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    ids = prompt if isinstance(prompt, list) else await _encoded(state, body, prompt)
    kept = body.truncate_prompt_tokens
    return tuple(ids if kept is None else ids[-kept:])


async def _encoded(state: RouterState, body: CompletionBody, prompt: str) -> list[int]:
    try:
        return await tokens.encode(
            state.vocabulary.tokenizer, prompt, special=body.add_special_tokens
        )
    except UnicodeEncodeError:
        raise invalid("prompt must be text, but holds half of a surrogate pair", "prompt") from None
