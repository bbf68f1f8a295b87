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
from router.openai.answers.chat_formatter import (
    ChatFormatter,
    ChatResponseOptions,
    reasoning_fields,
)
from router.openai.answers.completion_formatter import (
    CompletionFormatter,
    CompletionResponseOptions,
)
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.completion_body import CompletionBody
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.logprob_counts import chat_logprob_counts, completion_logprob_counts
from router.openai.bodies.tools import ToolOptions
from router.openai.chat.output_plan import OutputPlan
from router.openai.prompts.prompt_encoder import EncodedChat, TokenLimit

_LONG_IDS = 1 << 14  # tokens whose checks take some 0.5 ms
_UNLIMITED = 1 << 31  # tokens: more than a body holds

Prompt = tuple[int, ...]


class GenerationPlan(NamedTuple):
    """What one request asks for, in the terms of the router."""

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
            "allowed_token_ids": body.allowed_token_ids,
            "logprob_token_ids": body.logprob_token_ids,
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
    """Checks that prompt and output fit the model; holds the field names for the error message.
    Without ``output_field`` the client has not bounded the output."""

    prompt_field: str
    output_field: str | None

    def check(self, prompt: int, output: int, model: ModelInfo, *, at_least: bool = False) -> None:
        """Raises ApiError (400) when so many tokens do not fit the model together. ``at_least``:
        the prompt was not counted, and has that many or more."""
        if not prompt:
            raise invalid(f"{self.prompt_field} contains no tokens", self.prompt_field)
        if prompt + output > model.max_model_len:
            counted = f"at least {prompt}" if at_least else f"{prompt}"
            rest = "which leaves none for the output"
            if self.output_field:
                rest = f"and {self.output_field} asks for {output} more"
            whole = prompt >= model.max_model_len
            raise ApiError(
                400,
                # Clients such as LiteLLM recognise the error by its beginning.
                f"This model's maximum context length is {model.max_model_len} tokens. However,"
                f" {self.prompt_field} has {counted} tokens, {rest}.",
                param=self.prompt_field if whole else self.output_field or self.prompt_field,
                code="context_length_exceeded",
                overflow=(prompt, model.max_model_len),
            )


COMPLETION_LIMIT = ContextLimit("prompt", "max_tokens")


async def plan_completion(
    state: RouterState, body: CompletionBody, model: ModelInfo, claim: WorkClaim
) -> GenerationPlan:
    """Plan a completion. Raises ApiError (400) for prompts that do not fit the model."""
    prompts = [await _prompt_ids(state, body, prompt, model, claim) for prompt in body.prompt]
    counts = completion_logprob_counts(body, prompts, model.vocab_size)
    output = await state.formats.plan(body, claim.tenant)
    logprobs = body.logprobs is not None
    options = CompletionResponseOptions(
        logprobs, body.return_token_ids, counts.prompt, body.include_usage
    )
    naming = TokenNaming(state.vocabulary, body.return_tokens_as_token_ids)

    def new_formatter(header: ResponseHeader, of_choices: list[Prompt]) -> ResponseFormatter:
        return CompletionFormatter(header, naming, options, of_choices)

    return GenerationPlan(
        prompts=prompts,
        sampling=body.sampling_params(
            max_tokens=max(body.max_tokens, 1),  # workers always draw one
            logprobs=counts.output,
            prompt_logprobs=counts.of_prompts,
            grammar=output.grammar,
        ),
        new_formatter=new_formatter,
        output=_output_options(state, body, logprobs=logprobs)._replace(
            echo=body.echo, prompt_only=body.max_tokens == 0
        ),
        candidates=body.candidates,
    )


async def _prompt_ids(
    state: RouterState,
    body: CompletionBody,
    prompt: str | list[int],
    model: ModelInfo,
    claim: WorkClaim,
) -> Prompt:
    output = max(body.max_tokens, 1)
    kept = body.kept_tokens(model.max_model_len - output)

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
    *,
    fits_output: bool = False,
) -> GenerationPlan:
    """Plan a chat; the answer is written by ``new_chat_formatter``. ``fits_output``: a bound on the
    output that does not fit the model is lowered, not refused. Raises ApiError (400) for what the
    model's template or context cannot take."""
    limit = _chat_limit(body, model, fits_output=fits_output)
    output, chat = await _encode_chat(state, body, limit, claim)
    ids = chat.ids
    limit.check(len(ids), False)
    max_tokens = _max_chat_tokens(state, body, len(ids), model, fits_output=fits_output)
    output = state.formats.plan_reasoning(output, body.reasoning, chat.tail, max_tokens)
    counts = chat_logprob_counts(body, ids, max_tokens, model.vocab_size)
    options = ChatResponseOptions(
        *(body.logprobs, body.return_token_ids, body.include_usage),
        prompt_logprobs=counts.prompt is not None,
        reasoning_fields=reasoning_fields(state.settings.reasoning_field),
        echo=body.echoed_text,
    )
    naming = TokenNaming(state.vocabulary, body.return_tokens_as_token_ids)
    shown = _output_options(state, body, logprobs=body.logprobs)
    if output.show_special:
        shown = shown._replace(skip_special=False)
    if output.reasoning is not None:
        shown = shown._replace(reasoning=output.reasoning.marks)

    def new_formatter(header: ResponseHeader, of_choices: list[Prompt]) -> ResponseFormatter:
        return new_chat_formatter(header, naming, options, output, of_choices[0])

    return GenerationPlan(
        prompts=[tuple(ids)],
        sampling=body.sampling_params(
            max_tokens=max_tokens,
            logprobs=counts.output,
            prompt_logprobs=counts.of_prompts,
            grammar=output.grammar,
        ),
        new_formatter=new_formatter,
        output=shown,
        candidates=body.n,
    )


async def count_chat_tokens(state: RouterState, body: ChatBody, claim: WorkClaim) -> int:
    """Return how many tokens a chat's prompt has. Raises ApiError."""
    if body.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens is not supported: the tokens of whole prompts are counted"
        raise invalid(message, "truncate_prompt_tokens", "unsupported_parameter")
    limit = TokenLimit(_UNLIMITED, lambda _count, _at_least: None)
    return len(await chat_tokens(state, body, claim, limit))


async def chat_tokens(
    state: RouterState, body: ChatBody, claim: WorkClaim, limit: TokenLimit
) -> list[int]:
    """Return the prompt of a chat, which need not fit the model. Raises ApiError."""
    _, chat = await _encode_chat(state, body, limit, claim)
    return chat.ids


async def _encode_chat(
    state: RouterState, body: ChatBody, limit: TokenLimit, claim: WorkClaim
) -> tuple[OutputPlan, EncodedChat]:
    """Return the plan of the output, which says what tools the template shows, and the prompt."""
    if state.formats.template is None:
        raise _no_template(state)
    tools = ToolOptions(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    output = await state.formats.plan(body, claim.tenant, tools)
    chat = await state.formats.prompts.encode_chat(
        body.messages,
        output.tools,
        limit,
        claim,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final=body.continue_final_message,
        special=body.add_special_tokens,
        options=state.formats.template_options(body),
    )
    return output, chat


def _chat_limit(body: ChatBody, model: ModelInfo, *, fits_output: bool) -> TokenLimit:
    """The output takes what the client asks for, or at least one token."""
    limit, output = ContextLimit("messages", body.output_field), body.max_output_tokens
    if output is None or fits_output:
        limit, output = limit._replace(output_field=None), 1
        if body.min_tokens > 1:
            limit, output = limit._replace(output_field="min_tokens"), body.min_tokens

    room = model.max_model_len - output
    kept = body.kept_tokens(room)

    def check_length(count: int, at_least: bool) -> None:
        used = min(count, kept or count)
        limit.check(used, output, model, at_least=at_least and used == count)

    return TokenLimit(max(0, room), check_length, kept)


def _max_chat_tokens(
    state: RouterState, body: ChatBody, prompt: int, model: ModelInfo, *, fits_output: bool
) -> int:
    """Output tokens: what fits the model and every decode worker where the client sets no limit."""
    wanted = body.max_output_tokens
    if wanted is not None and not fits_output:
        return wanted
    totals = [link.load().kv_total for link in state.pool.links.values() if link.attached]
    smallest = min((tokens for tokens in totals if tokens), default=model.max_model_len)
    room = max(1, body.min_tokens, min(model.max_model_len, smallest) - prompt)
    wanted = wanted or state.defaults.max_tokens
    return room if wanted is None else min(max(wanted, body.min_tokens), room)


def _no_template(state: RouterState) -> ApiError:
    return invalid(
        f"the model {state.settings.model_id!r} has no chat template: use /v1/completions",
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
