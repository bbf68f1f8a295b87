"""A chat's body to its plan."""

from __future__ import annotations

from protocol.directory import ModelInfo
from router.api.chat_body import ChatBody
from router.api.chat_form import ChatForm, ChatShows
from router.api.form import Form, Head, Naming
from router.chat.tools import ToolWish
from router.errors import ApiError, invalid
from router.plan import Plan, Prompt, manner_of
from router.room import Room
from router.state import RouterState


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
