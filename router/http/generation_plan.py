"""A completion's body to its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from protocol.registry.directory import ModelInfo
from router.common import tokenizer
from router.common.errors import ApiError, invalid
from router.http.job import Plan, Prompt, manner_of
from router.http.state import RouterState
from router.openai.answers.answer_form import Form, Head, Naming
from router.openai.answers.chat_answer import ChatForm, ChatShows
from router.openai.answers.completion_answer import CompletionForm, CompletionShows
from router.openai.bodies.generation_body import ChatBody, CompletionBody
from router.openai.bodies.tools import ToolWish

# MERGED router.room
# Whether prompt and output fit the model.


class Room(NamedTuple):
    """Names the fields that a message about too long a request speaks of."""

    prompt: str
    output: str

    def check(self, prompt: int, output: int, model: ModelInfo) -> None:
        """Raises ApiError (400) when so many tokens do not fit the model together."""
        if not prompt:
            raise invalid(f"{self.prompt} holds no tokens", self.prompt)
        if prompt + output > model.max_model_len:
            raise invalid(
                f"the model takes {model.max_model_len} tokens, prompt and output together; this"
                f" request has {prompt} in the prompt and asks for {output} ({self.output})",
                self.prompt if prompt >= model.max_model_len else self.output,
                "context_length_exceeded",
            )


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
        return await tokenizer.encode(
            state.vocabulary.tokenizer, prompt, special=body.add_special_tokens, room=room
        )
    except UnicodeEncodeError:
        raise invalid("prompt must be text, but holds half of a surrogate pair", "prompt") from None


# MERGED router.chat_plan
# A chat's body to its plan.


async def plan_chat(state: RouterState, body: ChatBody, model: ModelInfo, tenant: str) -> Plan:
    """Raises ApiError (400) for a chat that the model's template or context does not take."""
    template = state.formats.template
    if template is None:
        raise _no_template(state)
    wish = ToolWish(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    output = await state.formats.plan(body, tenant, wish)
    ids = await template.prompt(
        body.messages,
        output.tools,
        add_generation_prompt=body.add_generation_prompt,
        options=body.chat_template_kwargs,
    )
    most = _most(state, body, len(ids), model)
    shows = ChatShows(body.logprobs, body.return_token_ids)
    naming = Naming(state.vocabulary, body.return_tokens_as_token_ids)
    manner = manner_of(state, body, tracked=body.logprobs)
    if output.show_special:
        manner = manner._replace(skip_special=False)

    def form(head: Head, of_choices: list[Prompt]) -> Form:
        return ChatForm(head, naming, shows, output, of_choices[0])

    return Plan(
        prefix="chatcmpl",
        prompts=[tuple(ids)],
        max_tokens=most,
        form=form,
        manner=manner,
        candidates=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=output.grammar,
    )


def _most(state: RouterState, body: ChatBody, prompt: int, model: ModelInfo) -> int:
    """Output tokens: what fits the model and every decode worker, where the client does not say."""
    room = Room("messages", body.output_field)
    if body.most is not None:
        room.check(prompt, body.most, model)
        return body.most
    least = max(1, body.min_tokens)
    room._replace(output="min_tokens").check(prompt, least, model)
    pools = [link.load().kv_total for link in state.pool.links.values() if link.attached]
    held = min((tokens for tokens in pools if tokens), default=model.max_model_len)
    return max(least, min(model.max_model_len, held) - prompt)


def _no_template(state: RouterState) -> ApiError:
    return invalid(
        f"the model {state.settings.model_id!r} has no chat template: it takes"
        " /v1/completions only",
        "messages",
        "chat_template_missing",
    )
