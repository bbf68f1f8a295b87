"""A model's chat template: loads it from the model's folder, renders and tokenizes prompts.

The template comes from the operator, its input from the client. A sandbox denies access to Python
internals and changes to the input, and limits time and size. The dialect of Jinja is that of
``transformers.PreTrainedTokenizerBase.apply_chat_template``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from protocol.errors import StartupError
from router.common.errors import invalid
from router.openai.bodies.messages import Message, message_chars, to_template_message
from router.openai.chat.control_tokens import ControlTokens

LONG_CHAT = 4096
"""Characters from which a prompt is rendered in a thread (some milliseconds), so that streams do
not wait."""

MAX_CHARS = 32 << 20
"""Length of a rendered prompt: four times the largest body, since a template may repeat its
input."""

MAX_SECONDS = 5.0
"""Checked whenever the template has written a piece."""

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


class RenderError(Exception):
    """The template refused its input or failed; the message is for the client."""


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
        self._special = dict(special)
        self._developer = {name: "developer" in text for name, text in sources.items()}
        self._control = ControlTokens(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, str]:
        """Return the prompt as text, and the break in it (``control_tokens``), empty where unused.

        ``options``: further variables of the template (``chat_template_kwargs``). Raises ApiError
        (400) where the template refuses or fails.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        options = dict(options or {})
        if clash := sorted(options.keys() & (_RESERVED | self._special.keys())):
            message = f"chat_template_kwargs must not hold {clash[0]!r}"
            raise invalid(message, "chat_template_kwargs")
        developer = self._developer[name]
        chat = [to_template_message(message, developer=developer) for message in messages]
        try:
            (chat, shown, options), mark = self._control.insert_breaks([chat, list(tools), options])
            text = render(
                self._templates[name],
                {
                    **self._special,
                    **options,
                    "messages": chat,
                    "tools": shown or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except RecursionError:
            raise invalid("messages or tools are nested too deeply", "messages") from None
        except RenderError as error:
            raise invalid(f"messages {error}"[:1000], "messages", "invalid_messages") from None
        return text, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of ``render``'s result; the template writes the special tokens
        itself."""
        return self._control.encode(text, mark)

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt, made in a thread where it is long. Raises like
        ``render``."""

        def make() -> list[int]:
            text, mark = self.render(
                messages, tools, add_generation_prompt=add_generation_prompt, options=options
            )
            return self.encode(text, mark)

        if len(messages) > 64 or tools or options or sum(map(message_chars, messages)) > LONG_CHAT:
            return await asyncio.to_thread(make)
        return make()


def load_template(model_path: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the chat template of a model's folder; None where it has none.

    The places are those of Hugging Face: ``chat_template.jinja`` with
    ``additional_chat_templates/``, or ``chat_template.json``, or ``chat_template`` in
    ``tokenizer_config.json`` (one text, or a list of names and texts). Raises StartupError for one
    that cannot be read.
    """
    folder = Path(model_path)
    config = _read_json(folder / "tokenizer_config.json")
    sources = _template_texts(folder, config)
    if not sources:
        return None
    special = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(
        config
    )
    try:
        return ChatTemplate(sources, special, tokenizer)
    except TemplateError as error:
        raise StartupError(f"the chat template in {folder} is no template: {error}") from error


def _template_texts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        more = (folder / "additional_chat_templates").glob("*.jinja")
        return {"default": _read(path), **{extra.stem: _read(extra) for extra in more}}
    of_config = config.get("chat_template")
    given = _read_json(folder / "chat_template.json").get("chat_template", of_config)
    if isinstance(given, list):
        entries = [entry for entry in given if isinstance(entry, dict)]
        given = {entry.get("name"): entry.get("template") for entry in entries} or given
    if isinstance(given, str):
        given = {"default": given}
    if not given:
        return {}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise StartupError(f"the chat template in {folder} is neither text nor a list of texts")
    # Without a default, the first is the default.
    return {"default": next(iter(given.values())), **given}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and the like, each given as text or as an object with its
    ``content``."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if re.fullmatch("[a-z_]+_token", name) and isinstance(text, str):
            found[name] = text
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the chat template at {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


class _Generation(Extension):
    """Ignores ``{% generation %}``, which marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: Callable[[], datetime] = datetime.now) -> Template:
    """Compile a template. Raises jinja2.TemplateError for invalid syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment.from_string(source)


def render(
    template: Template,
    variables: dict[str, Any],
    *,
    max_chars: int = MAX_CHARS,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Return the rendered text. Raises RenderError."""
    until = clock() + max_seconds
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise RenderError(f"make a prompt of more than {max_chars} characters")
            if clock() > until:
                raise RenderError(f"take the chat template more than {max_seconds:g} s")
    except TemplateError as error:
        raise RenderError(f"do not fit the model's chat template: {error.message}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise RenderError(f"do not fit the model's chat template: {error}") from error
    except (ArithmeticError, OverflowError, RecursionError, MemoryError) as error:
        raise RenderError(f"are too much for the chat template: {type(error).__name__}") from error
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
    raise TemplateError(message)
