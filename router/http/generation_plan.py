"""A checked body becomes a ``GenerationPlan``: prompts as token ids, sampling, output options.

``plan_completion`` and ``plan_chat`` are called by ``router.http.intake``, which makes the plan's
choices and their response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from protocol.registry.directory import ModelInfo
from protocol.sampling_params import SamplingParams
from router.common.errors import ApiError, invalid
from router.common.work_lane import WorkClaim
from router.generation.choice_text import OutputOptions
from router.http.state import RouterState
from router.openai.answers.chat_formatter import ChatFormatter, ChatResponseOptions
from router.openai.answers.completion_formatter import (
    CompletionFormatter,
    CompletionResponseOptions,
)
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.bodies.generation_body import ChatBody, CompletionBody, GenerationBody
from router.openai.bodies.tools import ToolOptions
from router.openai.chat.output_plan import OutputPlan
from router.openai.prompts.prompt_encoder import TokenLimit

MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of prompts in one response: some 20 MB of JSON."""

_LONG_IDS = 1 << 14  # tokens whose checks take some 0.5 ms

Prompt = tuple[int, ...]


class GenerationPlan(NamedTuple):
    """What one request asks for, in the terms of the router."""

    id_prefix: str  # of the response's id
    prompts: list[Prompt]
    sampling: SamplingParams  # of the first choice of each prompt
    new_formatter: Callable[[ResponseHeader, list[Prompt]], ResponseFormatter]
    """Takes the header of the response and the prompt of each choice."""
    output: OutputOptions
    candidates: int  # choices of each prompt, of which the best ``n`` are returned

    def check_vocabulary(self, body: GenerationBody, model: ModelInfo) -> None:
        """Raises ApiError (400) for token ids beyond the vocabulary."""
        ids_by_field = {
            "prompt": [max(prompt) for prompt in self.prompts],
            "logit_bias": [token for token, _ in body.logit_bias],
            "stop_token_ids": body.stop_token_ids,
        }
        for field, ids in ids_by_field.items():
            highest = max(ids, default=0)
            if highest >= model.vocab_size:
                raise invalid(
                    f"{field} holds token id {highest}; the vocabulary ends at"
                    f" {model.vocab_size - 1}",
                    field,
                )


class ContextLimit(NamedTuple):
    """Checks that prompt and output fit the model; holds the field names for the error message."""

    prompt_field: str
    output_field: str

    def check(self, prompt: int, output: int, model: ModelInfo, *, at_least: bool = False) -> None:
        """Raises ApiError (400) when so many tokens do not fit the model together. ``at_least``:
        the prompt was not counted, and has that many or more."""
        if not prompt:
            raise invalid(f"{self.prompt_field} holds no tokens", self.prompt_field)
        if prompt + output > model.max_model_len:
            counted = f"at least {prompt}" if at_least else f"{prompt}"
            raise invalid(
                f"the model takes {model.max_model_len} tokens, prompt and output together; this"
                f" request has {counted} in the prompt and asks for {output} ({self.output_field})",
                self.prompt_field if prompt >= model.max_model_len else self.output_field,
                "context_length_exceeded",
            )


COMPLETION_LIMIT = ContextLimit("prompt", "max_tokens")


async def plan_completion(
    state: RouterState, body: CompletionBody, model: ModelInfo, claim: WorkClaim
) -> GenerationPlan:
    """Plan a completion. Raises ApiError (400) for prompts that do not fit the model."""
    prompts = [await _prompt_ids(state, body, prompt, model, claim) for prompt in body.prompt]
    _check_prompt_logprobs(body, prompts)
    output = await state.formats.plan(body, claim.tenant)
    logprobs = body.logprobs is not None
    options = CompletionResponseOptions(
        logprobs, body.return_token_ids, body.prompt_logprobs, body.include_usage
    )
    naming = TokenNaming(state.vocabulary, body.return_tokens_as_token_ids)

    def new_formatter(header: ResponseHeader, of_choices: list[Prompt]) -> ResponseFormatter:
        return CompletionFormatter(header, naming, options, of_choices)

    return GenerationPlan(
        id_prefix="cmpl",
        prompts=prompts,
        sampling=body.sampling_params(
            max_tokens=max(body.max_tokens, 1),  # workers always draw one
            logprobs=_logprobs(body),
            prompt_logprobs=_prompt_logprobs(body),
            grammar=output.grammar,
        ),
        new_formatter=new_formatter,
        output=_output_options(state, body, logprobs=logprobs)._replace(
            echo=body.echo, prompt_only=body.max_tokens == 0
        ),
        candidates=body.candidates,
    )


def _logprobs(body: CompletionBody) -> int | None:
    """The best of many candidates are found by log-probabilities that need not be shown."""
    if body.logprobs is None and body.candidates > body.n:
        return 0
    return body.logprobs


def _prompt_logprobs(body: CompletionBody) -> int | None:
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in counts if count is not None), default=None)


def _check_prompt_logprobs(body: CompletionBody, prompts: list[Prompt]) -> None:
    """Raises ApiError (400) for a response with too many log-probabilities of prompts."""
    of_echo = body.logprobs if body.echo else None
    each = sum(count + 1 for count in (body.prompt_logprobs, of_echo) if count is not None)
    total = each * body.n * sum(map(len, prompts))
    if total > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise invalid(
            f"{field}: the answer would hold {total} log-probabilities of prompts (tokens of all"
            f" prompts times n times {each}); at most {MAX_PROMPT_LOGPROBS} are given",
            field,
        )


async def _prompt_ids(
    state: RouterState,
    body: CompletionBody,
    prompt: str | list[int],
    model: ModelInfo,
    claim: WorkClaim,
) -> Prompt:
    kept, output = body.truncate_prompt_tokens, max(body.max_tokens, 1)

    def check_length(count: int, at_least: bool) -> None:
        used = min(count, kept or count)
        COMPLETION_LIMIT.check(used, output, model, at_least=at_least and used == count)

    if isinstance(prompt, list):
        check_length(len(prompt), False)
        ids = prompt if kept is None else prompt[-kept:]
    else:
        limit = TokenLimit(max(0, model.max_model_len - output), check_length, kept)
        ids = await state.formats.prompts.encode_text(
            prompt, limit, claim, special=body.add_special_tokens
        )
    if len(body.prompt) > 1 or len(ids) > _LONG_IDS:
        await asyncio.sleep(0)  # they take a while; streams go on
    return tuple(ids)


NewChatFormatter = Callable[
    [ResponseHeader, TokenNaming, ChatResponseOptions, OutputPlan, Prompt], ResponseFormatter
]


async def plan_chat(
    state: RouterState,
    body: ChatBody,
    model: ModelInfo,
    claim: WorkClaim,
    new_chat_formatter: NewChatFormatter = ChatFormatter,
    id_prefix: str = "chatcmpl",
) -> GenerationPlan:
    """Plan a chat; the answer is written by ``new_chat_formatter``. Raises ApiError (400) for what
    the model's template or context cannot take."""
    if state.formats.template is None:
        raise _no_template(state)
    tools = ToolOptions(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    output = await state.formats.plan(body, claim.tenant, tools)
    ids = await state.formats.prompts.encode_chat(
        body.messages,
        output.tools,
        _chat_limit(body, model),
        claim,
        add_generation_prompt=body.add_generation_prompt,
        options=body.chat_template_kwargs,
    )
    options = ChatResponseOptions(body.logprobs, body.return_token_ids, body.include_usage)
    naming = TokenNaming(state.vocabulary, body.return_tokens_as_token_ids)
    shown = _output_options(state, body, logprobs=body.logprobs)
    if output.show_special:
        shown = shown._replace(skip_special=False)

    def new_formatter(header: ResponseHeader, of_choices: list[Prompt]) -> ResponseFormatter:
        return new_chat_formatter(header, naming, options, output, of_choices[0])

    return GenerationPlan(
        id_prefix=id_prefix,
        prompts=[tuple(ids)],
        sampling=body.sampling_params(
            max_tokens=_max_chat_tokens(state, body, len(ids), model),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=output.grammar,
        ),
        new_formatter=new_formatter,
        output=shown,
        candidates=body.n,
    )


def _chat_limit(body: ChatBody, model: ModelInfo) -> TokenLimit:
    """The output takes what the client asks for, or at least one token."""
    limit, output = ContextLimit("messages", body.output_field), body.max_output_tokens
    if output is None:
        limit, output = limit._replace(output_field="min_tokens"), max(1, body.min_tokens)

    def check_length(count: int, at_least: bool) -> None:
        limit.check(count, output, model, at_least=at_least)

    return TokenLimit(max(0, model.max_model_len - output), check_length)


def _max_chat_tokens(state: RouterState, body: ChatBody, prompt: int, model: ModelInfo) -> int:
    """Output tokens: what fits the model and every decode worker where the client sets no limit."""
    _chat_limit(body, model).check(prompt, False)
    if body.max_output_tokens is not None:
        return body.max_output_tokens
    totals = [link.load().kv_total for link in state.pool.links.values() if link.attached]
    smallest = min((tokens for tokens in totals if tokens), default=model.max_model_len)
    return max(1, body.min_tokens, min(model.max_model_len, smallest) - prompt)


def _no_template(state: RouterState) -> ApiError:
    return invalid(
        f"the model {state.settings.model_id!r} has no chat template: it takes"
        " /v1/completions only",
        "messages",
        "chat_template_missing",
    )


def _output_options(state: RouterState, body: GenerationBody, *, logprobs: bool) -> OutputOptions:
    return OutputOptions(
        logprobs=logprobs,
        stop_strings=body.stop,
        stop_tokens=state.vocabulary.eos | frozenset(body.stop_token_ids),
        min_tokens=body.min_tokens,
        keep_stops=body.include_stop_str_in_output,
        skip_special=body.skip_special_tokens,
    )
