"""Rendering on the event loop keeps its budget, whatever the template and its input are."""

from __future__ import annotations

import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.garbage_collection import without_garbage_collection
from router.openai.chat.metered_syntax import Unmetered
from router.openai.chat.metered_template import MAX_CHARS, Meter, MeteredEnvironment, TooCostly
from router.openai.chat.template import RenderError, _tojson, compile_metered, render_metered

MOST_CPU_S = 0.3  # thirty times the budget: machines that run tests are busy

DOUBLE = "{% set ns = namespace(x=messages[0].content) %}{% for i in range(60) %}"
NESTED = "{% set ns = namespace(x=1) %}" + "{% set ns = namespace(x=ns, y=ns) %}" * 26
SILENT = {
    "nested loops": "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops over the input": "{% for a in messages %}{% for b in messages %}{% for c in messages %}"
    "{% for d in messages %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "skipped items": "{% for a in range(1000) %}{% for b in range(1000) if b > 2000 %}{% endfor %}"
    "{% endfor %}",
    "skipped characters": "{% for m in messages %}{% for a in m.content %}"
    "{% for b in m.content if false %}{% endfor %}{% endfor %}{% endfor %}",
    "a large range": "{% for a in range(99999) %}{% endfor %}",
    "macros": "{% macro a(n) %}{{ b(n - 1) if n }}{{ b(n - 1) if n }}{% endmacro %}"
    "{% macro b(n) %}{{ a(n) }}{{ a(n) }}{% endmacro %}{{ a(99) }}",
    "endless recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "multiplied text": "{{ messages[0].content * (10 ** 9) }}",
    "multiplied list": "{% set x = messages * 999999999 %}",
    "large powers": "{% set x = messages | length ** 99999999 %}",
    "large products": DOUBLE.replace("messages[0].content", "3") + "{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "doubled by +": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by join": DOUBLE + "{% set ns.x = ns.x | join(ns.x) %}{% endfor %}",
    "doubled by a method": DOUBLE + "{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
    "doubled by a filter": DOUBLE + "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    "doubled by replace": DOUBLE + "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
    "doubled by a block": DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    "{% endfor %}",
    "doubled by a macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}"
    + DOUBLE
    + "{% set ns.x = d(ns.x) %}{% endfor %}",
    "doubled lists": DOUBLE.replace("messages[0].content", "messages")
    + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "lists in lists": DOUBLE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "tuples of arguments": "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1, 2) }}",
    "padding": "{{ 'x'.ljust(999999999) }}",
    "formats": "{{ '%999999999d' % 1 }}",
    "format method": "{{ '{:>999999999}'.format(1) }}",
    "a filter by its name": "{{ messages | map('center', 999999999) | join }}",
    "indentation": "{{ messages | tojson(indent=999999999) }}",
    "separators": "{{ messages | tojson(separators=(messages[0].content, ':')) }}",
    "dates": "{{ strftime_now('%999999999d') }}",
    "filler text": "{{ lipsum(n=99999) }}",
    "literal text": "{% for i in range(999) %}" + "x" * 9999 + "{% endfor %}",
    "written text": "{% for i in range(999) %}{{ m.content }}{{ m.content }}{% endfor %}",
    "stripped by text": "{% for i in range(999) %}{% if m.content.strip(m.content) %}{% endif %}"
    "{% endfor %}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "regular expressions": "{{ m.content | urlize }}{{ m.content | striptags }}",
    "wrapping": "{{ messages[0].content | wordwrap(1) | indent(99999999) }}",
    "sorting": "{{ range(99999) | sort | sum }}",
    "namespaces in namespaces": NESTED + "{{ ns | string | length }}",
    "namespaces in capitals": NESTED + "{{ ns | upper | length }}",
    "namespaces that are refused": NESTED + "{{ raise_exception(ns) }}",
    "items that are searched": "{{ letters | select('in', letters | list) | list | length }}",
    "characters that are searched": "{{ letters | select('in', letters) | list | length }}",
    "attributes of items": "{{ letters | list | map(attribute='x') | map('default', 1) | list"
    " | length }}" * 20,
    "large hexadecimal numbers": "{% set n = hex | int(0, 16) %}{% set m = hex[9:] | int(0, 16) %}"
    + "{{ n // m == 1 }}" * 31,
    "indentation of deep values": "{{ deep | tojson(indent=4) }}",
    "searches from the end": "{% for i in range(99) %}{{ hex.rfind(tail) }}{% endfor %}",
    "constants that are written": "{% for x in letters %}{{ '" + "q" * 9999 + "' }}{% endfor %}",
}
CHAT = [{"role": "user", "content": "x" * 1000} for _ in range(64)]
DEEP: Any = [1] * 30_000
for _ in range(300):
    DEEP = [DEEP]
INPUT = {
    "messages": CHAT,
    "m": CHAT[0],
    "letters": "".join(map(chr, range(0x4E00, 0x9000))) * 2,
    "hex": "f" * 60_000,
    "tail": "f0" + "f" * 20_000,
    "deep": DEEP,
}


@pytest.mark.parametrize("name", SILENT)
def test_a_hostile_template_ends_early(name: str) -> None:
    metered = compile_metered(SILENT[name])
    with without_garbage_collection():  # which takes as long with all that other tests have left
        start = time.thread_time()
        with pytest.raises(TooCostly):
            render_metered(metered, INPUT)
        assert time.thread_time() - start < MOST_CPU_S


def test_a_refusal_of_the_template_is_the_clients() -> None:
    metered = compile_metered("{{ raise_exception('no system here') }}")
    with pytest.raises(RenderError, match="no system here"):
        render_metered(metered, {"messages": CHAT})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role == 'user' %}{{ loop.index % 2 }}{{ m.role }}{% endfor %}",
        "{{ messages | tojson(indent=4) }}{{ messages | length * 3 - 1 }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n ~ '!' ~ none ~ missing }}",
        "{% macro f(m, sep=', ') %}{{ m.content.split('b') | join(sep) }}{% endmacro %}"
        "{{ f(messages[0]) }}{{ f(messages[-1], sep='') | trim }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}",
        "{% set c = messages[0].content %}{{ c.replace('b', 'longer').strip('a ') }}{{ 'a' in c }}",
        "{% for key, value in messages[0].items() %}{{ key }}={{ value | upper }};{% endfor %}",
        "{% for m in messages[1:] %}{{ loop.cycle('x', 'y') }}{{ 1 if loop.first }}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set x %}<{{ messages[0].role }}>{% endset %}{{ x + x }}",
        "{{ messages | map('tojson') | join('|') }}{{ range(3) | list | length }}",
        "{{ 'b' in messages[0].content and 'x' not in messages[0] }}{{ '7' | int + 1 }}",
        "{{ messages | selectattr('role', 'in', ['user', 'tool']) | list | tojson(indent=2) }}",
        "{{ none | map('upper') | list | length }}{{ 1 is in [1, 2] }}{{ missing is defined }}",
        "{{ messages | rejectattr('content', 'eq', 'b') | map(attribute='content') | join }}",
    ],
)
def test_a_common_template_gives_what_the_whole_language_gives(source: str) -> None:
    messages = [{"role": "user", "content": "abc b a"}, {"role": "assistant", "content": "b"}]
    whole = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    metered = compile_metered(source)
    assert metered is not None
    whole.filters["tojson"] = _tojson
    expected = whole.from_string(source).render(messages=messages)
    assert render_metered(metered, {"messages": messages}) == expected


def test_what_is_charged_is_charged_before_it_is_made() -> None:
    meter = Meter(clock=lambda: 0.0)
    environment = MeteredEnvironment(meter, lambda value, **_: "")
    meter.start()
    with pytest.raises(TooCostly):
        environment.call_binop(None, "+", "x" * (MAX_CHARS // 2), "x" * (MAX_CHARS // 2 + 1))
    meter.start()
    with pytest.raises(TooCostly):
        environment.filters["join"](["x" * 100_000] * 20)


def test_the_clock_ends_what_the_characters_do_not() -> None:
    ticks = iter(range(10**6))
    meter = Meter(clock=lambda: float(next(ticks)))
    environment = MeteredEnvironment(meter, lambda value, **_: "")
    template = environment.from_string("{% for i in range(100) %}{% endfor %}")
    meter.start()
    with pytest.raises(TooCostly):
        template.render({})


def test_what_cannot_be_metered_is_named() -> None:
    environment = MeteredEnvironment(Meter(), lambda value, **_: "")
    for source, name in (("{{ 2 ** 3 }}", "Pow"), ("{{ x | urlize }}", "urlize")):
        with pytest.raises(Unmetered, match=name):
            environment.from_string(source)
