"""docs/api.md says what the server does: parameters, defaults, refusals, codes, examples."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from router.anthropic.body import MESSAGES_FIELDS
from router.common.errors import ApiError
from router.http.intake import (
    EXPLAIN_HEADER,
    SESSION_HEADER,
    TIMELINE_HEADER,
    TTFT_DEADLINE_HEADER,
)
from router.openai.bodies.chat_body import CHAT_ONLY, ChatBody, ChatDialect, parse_chat
from router.openai.bodies.completion_body import CompletionBody, parse_completion
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.parsing import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED
from router.openai.responses.body import RESPONSES_FIELDS, OpenFields
from router.openapi.document import openapi_document

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "api.md").read_text()

CODE_AT = {"invalid": 2, "failed": 1, "bad": 1, "about": 2, "_refused": 4}
"""Functions that make errors, and which of their arguments is the code."""


def section(heading: str) -> str:
    """The text below a heading, down to the next one."""
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S)
    assert found, heading
    return found[1]


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables in a section, without their heads."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ruled = [i for i, row in enumerate(cells) if set(row[0]) == {"-"}]
    heads = {i for rule in ruled for i in (rule, rule - 1)}
    return [row for i, row in enumerate(cells) if i not in heads]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fields(heading: str) -> dict[str, list[Any]]:
    """By parameter: the JSON values in the second column."""
    table = rows(heading)
    names = [quoted(row[0])[0] for row in table]
    assert len(set(names)) == len(names)
    return {
        name: [json.loads(value) for value in quoted(row[1])]
        for name, row in zip(names, table, strict=True)
    }


def defaults(model_fields: dict[str, FieldInfo]) -> dict[str, list[Any]]:
    """The same of a model: nothing where a field is required, or is off when it is left out."""
    return {
        name: [] if field.is_required() or field.default in (None, ()) else [field.default]
        for name, field in model_fields.items()
    }


@pytest.mark.parametrize(
    ("heading", "model", "base"),
    [
        ("Parameters of both", GenerationBody, None),
        ("Parameters of completions", CompletionBody, GenerationBody),
        ("Parameters of chats", ChatBody, GenerationBody),
        ("Responses", OpenFields, None),
    ],
)
def test_parameters_and_their_defaults(heading: str, model: Any, base: Any) -> None:
    above = base.model_fields if base else {}
    own = {name: field for name, field in model.model_fields.items() if name not in above}
    assert fields(heading) == defaults(own)


def test_refusals_and_what_changes_nothing() -> None:
    common = {
        name: CHAT_UNSUPPORTED[name]
        for name in CHAT_UNSUPPORTED.keys() & COMPLETION_UNSUPPORTED.keys()
    }
    of_completions = {n: v for n, v in COMPLETION_UNSUPPORTED.items() if n not in common}
    of_chats = {n: v for n, v in CHAT_UNSUPPORTED.items() if n not in common}
    for heading, neutral in (
        ("Refused in both", common),
        ("Refused in completions", of_completions),
        ("Refused in chats", of_chats),
        ("Responses: refused", _own_refusals(RESPONSES_FIELDS)),
    ):
        assert fields(heading) == {name: list(values) for name, values in neutral.items()}


def _own_refusals(dialect: ChatDialect) -> dict[str, Any]:
    """What a dialect refuses and chats do not have."""
    shared = {*CHAT_UNSUPPORTED, *CHAT_ONLY, *dialect.renamed}
    return {name: values for name, values in dialect.refused.items() if name not in shared}


def _effect(dialect: ChatDialect, name: str) -> str:
    if name in dialect.renamed:
        return f"use `{dialect.renamed[name]}`"
    if name in dialect.refused:
        return "refused"
    return "without effect" if name in dialect.without_effect else "taken"


def test_parameters_of_chats_in_other_dialects() -> None:
    dialects = (RESPONSES_FIELDS, MESSAGES_FIELDS)
    found = {name: [_effect(d, name) for d in dialects] for name in ChatBody.model_fields}
    table = rows("Parameters of chats in other dialects")
    told = {quoted(name)[0]: effects for name, *effects in table}
    assert told == {n: effects for n, effects in found.items() if effects != ["taken", "taken"]}


def test_parameters_of_responses_that_have_no_effect() -> None:
    told = [name for row in rows("Responses: without effect") for name in quoted(row[0])]
    assert sorted(told) == sorted(RESPONSES_FIELDS.without_effect - ChatBody.model_fields.keys())


def test_endpoints() -> None:
    told = {q.split()[1] for row in rows("Endpoints") for q in quoted(row[0])}
    paths = openapi_document(["a model"])["paths"]
    assert told == {path.replace("{name}", "{id}") for path in paths}


def test_headers() -> None:
    told = {quoted(row[0])[0] for row in rows("Headers of a request")}
    for source in ("chat/completions", "completions"):
        post = openapi_document(["a model"])["paths"][f"/v1/{source}"]["post"]
        named = {n for n in told if "baton" in n} | {SESSION_HEADER}
        assert {p["name"] for p in post["parameters"]} == named
    assert {EXPLAIN_HEADER, TIMELINE_HEADER, TTFT_DEADLINE_HEADER, SESSION_HEADER} <= told


def codes_in(source: str) -> Iterator[str]:
    """Codes of the errors that a module raises."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            named = zip(node.keys, node.values, strict=True)
            values = [v for k, v in named if isinstance(k, ast.Constant) and k.value == "code"]
        elif isinstance(node, ast.Call):
            values = [k.value for k in node.keywords if k.arg == "code"]
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            values += node.args[CODE_AT.get(name, len(node.args)) :][:1]
        else:
            continue
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def test_codes_of_errors() -> None:
    sources = [path.read_text() for path in (ROOT / "router").rglob("*.py")]
    raised = {code for source in sources for code in codes_in(source)}
    table = rows("Errors")
    told = {code for row in table for code in quoted(row[2 if len(row) == 4 else 0])}
    assert len(raised) > 15
    assert raised <= told
    assert all(any(f'"{code}"' in source for source in sources) for code in told)


def test_the_example_of_an_error() -> None:
    (shown,) = re.findall(r"^```json\n(.*?)^```", section("Errors"), re.M | re.S)
    with pytest.raises(ApiError) as raised:
        parse_completion({"model": "m", "prompt": "x", "temperature": 3})
    assert json.loads(raised.value.body()) == json.loads(shown)


EXAMPLES = re.findall(r"^curl [^\n]*/v1/(\S+) \\\n.*?-d '(.*?)'\n", TEXT, re.M | re.S)


def test_examples_are_taken() -> None:
    assert len(EXAMPLES) >= 5
    for endpoint, body in EXAMPLES:
        parse = {"completions": parse_completion, "chat/completions": parse_chat}[endpoint]
        parse(json.loads(body))
