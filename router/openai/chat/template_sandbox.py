"""Runs chat templates in a sandbox with limits, in Hugging Face's dialect of Jinja.

The template comes from the operator, its input from the client. The sandbox denies access to Python
internals and changes to the input. The dialect is that of
``transformers.PreTrainedTokenizerBase.apply_chat_template``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 32 << 20
"""Length of a rendered prompt: four times the largest body, since a template may repeat its
input."""

MAX_SECONDS = 5.0
"""Checked whenever the template has written a piece."""


class RenderError(Exception):
    """The template refused its input or failed; the message is for the client."""


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
