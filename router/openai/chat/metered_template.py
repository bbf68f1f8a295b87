"""Renders common chat templates on the event loop, within a budget that is really kept.

A template comes from the operator, but what it costs depends on the client's messages, and Python
code cannot be interrupted from outside. ``MeteredTemplate`` bounds the cost from inside:

- Only operations with a cost linear in their operands are there: a fixed list of nodes, filters,
  functions and methods. ``*`` is for small numbers; ``**``, formatting and literals that hold
  variables are not there.
- Each turn of a loop (skipped ones included), each call of a macro and everything that makes or
  writes text is charged with its characters before it is made. So no value is larger than
  ``MAX_CHARS``, and no loop runs without being counted.
- Filters that pass over items are charged for each of them, and what only reads (tests, ``in``) is
  counted for the clock.
- The thread's processor time is looked at every few charges, sooner where they are for much text.
  A template that needs fewer than two looks never asks for it: that is a call into the kernel.

What exceeds the budget, or fails in any way but by ``raise_exception``, raises ``TooCostly``, and
the caller renders the chat in a child process instead (``router.openai.prompts``), with the whole
language. A template that needs more than the list above goes there always (``Unmetered``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from router.openai.chat.metered_syntax import CONCAT, SEARCHED, AddCharges, check_syntax

MAX_CHARS = 1 << 20
"""Characters that one render may read and write."""

MAX_CPU_S = 0.01
MAX_RANGE = 1000
_LOOK_EVERY = 32  # charges between two looks at the clock
_CHARGE_CHARS = 1024  # characters or items that count as another charge for the clock
_MAX_NUMBER = 1 << 53
_MAX_ARGUMENT = 64  # characters in arguments that a method compares with every character
_MAX_DIGITS = 64  # of texts that become numbers: divisions take the square of their length
_SCALARS = (str, int, float, Undefined, type(None))

_FILTERS = (
    *("capitalize", "count", "d", "default", "first", "float", "int", "items", "join", "last"),
    *("length", "list", "lower", "map", "reject", "rejectattr", "replace", "safe", "select"),
    *("selectattr", "string", "title", "trim", "upper"),
)
_WRITING_FILTERS = {"capitalize", "lower", "safe", "string", "title", "upper"}
"""They write any value as text. A namespace may hold another one many times over."""

_ITERATING_FILTERS = {"map", "reject", "rejectattr", "select", "selectattr"}
_SIZED = (str, list, tuple, dict)
_TEXT_METHODS = (
    *("capitalize", "count", "endswith", "find", "index", "isalnum"),
    *("isalpha", "isdigit", "islower", "isspace", "isupper", "join"),
    *("lower", "lstrip", "replace", "rfind", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "title", "upper"),
)
_METHODS: Mapping[type, Iterable[str]] = {
    str: _TEXT_METHODS,
    dict: ("get", "items", "keys", "values"),
    list: ("count", "index"),
    tuple: ("count", "index"),
    LoopContext: ("changed", "cycle"),
}


class TooCostly(Exception):
    """The render exceeds the budget or fails; a child process decides."""


class Meter:
    """Counts what one render costs. One per template: a render does not wait for anything."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._chars = MAX_CHARS
        self._unlooked = 0  # charges since the last look at the clock
        self._until: float | None = None  # set by the first look

    def start(self) -> None:
        self._chars = MAX_CHARS
        self._unlooked = 0
        self._until = None

    def charge(self, chars: int) -> bool:
        """Count ``chars`` and one operation. Raises TooCostly; returns True for conditions."""
        self._chars -= chars + 1
        if self._chars < 0:
            raise TooCostly
        self.note(chars)
        return True

    def note(self, chars: int) -> None:
        """Count ``chars`` that are only read, for the clock alone."""
        self._unlooked += 1 + chars // _CHARGE_CHARS
        if self._unlooked >= _LOOK_EVERY:
            self._unlooked = 0
            now = self._clock()
            if self._until is None:
                self._until = now + MAX_CPU_S
            elif now > self._until:
                raise TooCostly

    def charge_value(self, value: Any) -> Any:
        """Count a scalar that is written, and return it. Nested values are written by tojson."""
        if not isinstance(value, _SCALARS):
            raise TooCostly
        self.charge(len(value) if isinstance(value, str) else 0)
        return value


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with the operations that can be metered. ``extra``: options of the constructor."""

    intercepted_binops = frozenset(("+", "*", "%"))

    def __init__(self, meter: Meter, tojson: Callable[..., str], **extra: Any) -> None:
        super().__init__(finalize=meter.charge_value, **extra)
        self._meter = meter
        self.charge = meter.charge
        self.filters = {name: self._charging(name) for name in _FILTERS}
        self.filters["join"] = self._join
        self.filters["trim"] = self._trim
        self.filters["replace"] = self._replace
        self.filters["int"] = self._int
        self.filters["tojson"] = self._tojson(tojson)
        self.filters[CONCAT] = self._concat
        self.filters[SEARCHED] = self._searched
        self.tests = {name: self._noting(test) for name, test in TESTS.items()}
        self.globals = {"range": self._range, "namespace": Namespace}

    def allow(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function whose cost is small."""
        self.globals[name] = function

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        check_syntax(tree, self.filters)
        charged: nodes.Template = AddCharges().visit(tree)
        return charged

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) and isinstance(left, str | list | tuple):
            self._meter.charge(len(left) + len(right))
        elif not (_is_small(left) and _is_small(right)):
            raise TooCostly
        return self.binop_table[operator](left, right)

    def call(*arguments: Any, **named: Any) -> Any:
        # As in the base class, the names of the parameters must not clash with the template's.
        self, context, function, *given = arguments
        if function == self.charge:
            return self.charge(*given)
        self._check_call(function, given, named)
        if isinstance(function, Macro) or function in self.globals.values():
            result = ImmutableSandboxedEnvironment.call(self, context, function, *given, **named)
        else:
            named = {k: v for k, v in named.items() if k not in ("_loop_vars", "_block_vars")}
            result = function(*given, **named)
        self._meter.charge(len(result) if isinstance(result, str | list | tuple) else 0)
        return result

    def _check_call(self, function: Any, given: list[Any], named: Mapping[str, Any]) -> None:
        if isinstance(function, Macro) or function in self.globals.values():
            return
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name not in _METHODS.get(type(owner), ()) or named.keys() - {"_loop_vars"}:
            raise TooCostly
        if isinstance(owner, str):
            self._check_method(owner, name, given)

    def _check_method(self, text: str, name: str, given: list[Any]) -> None:
        self._meter.charge(len(text))
        if name == "join":
            given[0] = _parts(given[0])
            self._meter.charge(sum(map(len, given[0])) + len(text) * len(given[0]))
        elif name == "replace":
            self._charge_replaced(text, given)
        elif (
            "strip" in name or name in ("rfind", "rsplit")  # no quick search from the end
        ) and any(_size(argument) > _MAX_ARGUMENT for argument in given):
            raise TooCostly

    def _charge_replaced(self, text: str, given: Iterable[Any]) -> None:
        old, new, *_ = [str(each) for each in given if isinstance(each, str)]
        self._meter.charge((text.count(old) if len(new) > len(old) else 0) * len(new))

    def _charging(self, name: str) -> Callable[..., Any]:
        """Return a filter of Jinja's that is charged with its input, at once or item by item."""
        function = FILTERS[name]
        passes_environment = hasattr(function, "jinja_pass_arg")
        place = 1 if passes_environment else 0

        def charged(*given: Any, **named: Any) -> Any:
            value = given[place]
            if name in _WRITING_FILTERS:
                self._meter.charge_value(value)
            elif name in _ITERATING_FILTERS and value:
                given = (*given[:place], self._counted(value), *given[place + 1 :])
            else:
                self._meter.charge(_size(value))
            return function(*given, **named)

        if passes_environment:
            charged.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return charged

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._meter.charge(0)
            yield value

    def _noting(self, function: Any) -> Callable[..., Any]:
        """Return a test of Jinja's that is counted with all of its operands."""

        def noted(*given: Any, **named: Any) -> Any:
            self._meter.note(sum(map(_size, given)))
            return function(*given, **named)

        if hasattr(function, "jinja_pass_arg"):
            noted.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return noted

    def _searched(self, value: Any) -> Any:
        """Count what ``in`` searches, and return it."""
        self._meter.note(_size(value))
        return value

    def _int(self, value: Any, *options: Any, **named: Any) -> Any:
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise TooCostly
        return FILTERS["int"](value, *options, **named)

    def _join(self, value: Iterable[Any], d: str = "") -> str:
        parts = _parts(value)
        self._meter.charge(sum(map(len, parts)) + len(d) * len(parts))
        return d.join(parts)

    def _concat(self, values: list[Any]) -> str:
        return "".join([str(self._meter.charge_value(value)) for value in values])

    def _trim(self, value: Any, chars: str | None = None) -> str:
        self._meter.charge_value(value)
        if chars is not None and len(chars) > _MAX_ARGUMENT:
            raise TooCostly
        return str(value).strip(chars)

    def _replace(self, value: Any, old: str, new: str) -> str:
        self._meter.charge_value(value)
        self._charge_replaced(str(value), (old, new))
        return str(value).replace(old, new)

    def _tojson(self, tojson: Callable[..., str]) -> Callable[..., str]:
        def charged(value: Any, **options: Any) -> str:
            if any(isinstance(o, int | str) and _width(o) > 8 for o in options.values()):
                raise TooCostly
            if options.get("indent"):
                self._charge_indents(value, _width(options["indent"]))
            text = tojson(value, **options)
            self._meter.charge(len(text))
            return text

        return charged

    def _charge_indents(self, value: Any, width: int) -> None:
        """Charge the white space of JSON on lines of its own, which grows with the depth."""
        level, depth = [value], 1
        while level:
            inner: list[Any] = []
            for each in level:
                members = each.values() if isinstance(each, dict) else each
                if isinstance(each, dict | list | tuple):
                    self._meter.charge(len(each) * depth * width)
                    inner += [m for m in members if isinstance(m, dict | list | tuple)]
            level, depth = inner, depth + 1

    def _range(self, *given: int) -> range:
        if len(result := range(*given)) > MAX_RANGE:
            raise TooCostly
        return result


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and -_MAX_NUMBER < value < _MAX_NUMBER


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _width(option: int | str) -> int:
    return len(option) if isinstance(option, str) else abs(option)


def _parts(values: Any) -> list[str]:
    parts = list(islice(values, MAX_CHARS))
    if len(parts) == MAX_CHARS or not all(isinstance(part, str) for part in parts):
        raise TooCostly
    return parts
