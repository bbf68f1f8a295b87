"""A model's chat template: renders and tokenizes the prompts of chats.

The template comes from the operator, its input from the client. A sandbox denies access to Python
internals and changes to the input. The dialect of Jinja is that of
``transformers.PreTrainedTokenizerBase.apply_chat_template``. Rendering has no bound in time: a
router renders on its event loop only within a budget (``metered_template``), and everything else in
a child process (``router.openai.prompts``).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.common.errors import invalid
from router.openai.bodies.messages import Message, to_template_message
from router.openai.chat.control_tokens import ControlTokens
from router.openai.chat.metered_syntax import Unmetered
from router.openai.chat.metered_template import Meter, MeteredEnvironment, TooCostly

log = logging.getLogger(__name__)

MAX_CHARS = 32 << 20
"""Length of a rendered prompt: four times the largest body, since a template may repeat its
input."""

MAX_DATE_CHARS = 64
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


class RenderError(Exception):
    """The template refused its input or failed; the message is for the client."""


class TemplateRefusal(TemplateError):
    """The template has called ``raise_exception``."""


class ChatTemplate:
    """The templates of one model. ``sources``: their texts by name; ``default`` is required, and
    ``tool_use`` serves requests with tools. ``special``: special tokens by their names in the
    configuration, such as ``bos_token``.
    """

    def __init__(
        self, sources: Mapping[str, str], special: Mapping[str, str], tokenizer: Tokenizer
    ) -> None:
        self.source = sources.get("tool_use", sources["default"])
        """The template's text, from which the syntax of tool calls is detected."""
        self._templates = {name: compile_template(text) for name, text in sources.items()}
        self._metered = {name: compile_metered(text) for name, text in sources.items()}
        self._special = dict(special)
        self._developer = {name: "developer" in text for name, text in sources.items()}
        self._text_arguments = {name: joins_arguments(text) for name, text in sources.items()}
        self._control = ControlTokens(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, Any] | None = None,
        metered: bool = False,
    ) -> tuple[str, str]:
        """Return the prompt as text, and the break in it (``control_tokens``), empty where unused.

        ``continue_final``: the prompt ends with the text of the last message.
        ``options``: further variables of the template (``chat_template_kwargs``). ``metered``:
        within the budget of ``metered_template``. Raises ApiError (400) where the template refuses
        or fails, and TooCostly for a metered render that exceeds its budget or fails.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        options = dict(options or {})
        if clash := sorted(options.keys() & (_RESERVED | self._special.keys())):
            message = f"chat_template_kwargs must not hold {clash[0]!r}"
            raise invalid(message, "chat_template_kwargs")
        developer = self._developer[name]
        text_arguments = self._text_arguments[name]
        chat = [
            to_template_message(message, developer=developer, text_arguments=text_arguments)
            for message in messages
        ]
        end = f"end-{secrets.token_hex(16)}" if continue_final else ""
        chat[-1]["content"] += end
        try:
            (chat, shown, options), mark = self._control.insert_breaks([chat, list(tools), options])
            variables = {
                **self._special,
                **options,
                "messages": chat,
                "tools": shown or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            if metered:
                text = render_metered(self._metered[name], variables)
            else:
                text = render(self._templates[name], variables)
        except RecursionError:
            raise invalid("messages or tools are nested too deeply", "messages") from None
        except RenderError as error:
            raise invalid(f"messages {error}"[:1000], "messages", "invalid_messages") from None
        return _up_to(text, end) if end else text, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of ``render``'s result; the template writes the special tokens
        itself."""
        return self._control.encode(text, mark)


def _up_to(text: str, end: str) -> str:
    """Return the text before the last ``end``. Raises ApiError (400) where there is none."""
    before, found, _ = text.rpartition(end)
    if not found:
        message = "continue_final_message: the chat template does not show the last message"
        raise invalid(message, "continue_final_message", "invalid_messages")
    return before.replace(end, "")


_JOINED_ARGUMENTS = re.compile(
    r"arguments['\"\]]*\s*\+|\+\s*[\w.\[\]'\"]*arguments['\"\]]*\s*-?\}\}"
)


def joins_arguments(source: str) -> bool:
    """Return whether a template joins the arguments of calls to other text with ``+``, as
    DeepSeek's do: then they must be text."""
    return _JOINED_ARGUMENTS.search(source) is not None


class _Generation(Extension):
    """Ignores ``{% generation %}``, which marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_DIALECT: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [_Generation, loopcontrols],
}


class MeteredTemplate(NamedTuple):
    """A template that is rendered within a budget, and what counts it."""

    template: Template
    meter: Meter


def compile_template(source: str, now: Callable[[], datetime] = datetime.now) -> Template:
    """Compile a template. Raises jinja2.TemplateError for invalid syntax."""
    environment = ImmutableSandboxedEnvironment(**_DIALECT)
    environment.filters["tojson"] = _tojson
    _add_functions(environment, now)
    return environment.from_string(source)


def compile_metered(
    source: str, now: Callable[[], datetime] = datetime.now
) -> MeteredTemplate | None:
    """Compile a template for ``render_metered``; None for one that cannot be metered."""
    meter = Meter()
    environment = MeteredEnvironment(meter, _tojson, **_DIALECT)
    _add_functions(environment, now)
    try:
        return MeteredTemplate(environment.from_string(source), meter)
    except (Unmetered, TemplateError) as what:
        log.warning(
            "the chat template uses %s: each chat is rendered in a child process, which takes"
            " some milliseconds more",
            what,
        )
        return None


def _add_functions(environment: Environment, now: Callable[[], datetime]) -> None:
    def strftime_now(form: str) -> str:
        if len(form) > MAX_DATE_CHARS or any(c.isdigit() for c in form):  # "%999999999d"
            raise TemplateError("strftime_now takes a short format without widths")
        return now().strftime(form)

    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = strftime_now


def render_metered(metered: MeteredTemplate | None, variables: dict[str, Any]) -> str:
    """Return the rendered text. Raises RenderError where the template refuses its input, and
    TooCostly for whatever else goes wrong."""
    if metered is None:
        raise TooCostly
    metered.meter.start()
    try:
        return metered.template.render(variables)
    except TemplateRefusal as error:
        if not isinstance(error.message, str):  # a namespace may take for ever to be written
            raise TooCostly from error
        raise RenderError(f"do not fit the model's chat template: {error.message}") from error
    except Exception as error:  # a child process finds out, and says it to the client
        raise TooCostly from error


def render(template: Template, variables: dict[str, Any], *, max_chars: int = MAX_CHARS) -> str:
    """Return the rendered text, without a bound in time. Raises RenderError."""
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise RenderError(f"make a prompt of more than {max_chars} characters")
    except TemplateError as error:
        raise RenderError(f"do not fit the model's chat template: {error.message}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise RenderError(f"do not fit the model's chat template: {error}") from error
    except (ArithmeticError, OverflowError, RecursionError, MemoryError) as error:
        raise RenderError(f"are too large for the chat template: {type(error).__name__}") from error
    return "".join(pieces)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON: Jinja's own filter escapes characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateRefusal(message)
