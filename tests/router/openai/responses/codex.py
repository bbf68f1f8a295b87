"""Bodies of the kind that Codex sends, written from ../shared/agent-clients.md (3 and 10)."""

from __future__ import annotations

from typing import Any

from tests.router.conftest import MODEL

HEADERS = {
    "originator": "codex_exec",
    "session-id": "0199-session",
    "thread-id": "0199-thread",
    "x-client-request-id": "0199-request",
    "x-codex-turn-metadata": "{}",
    "accept": "text/event-stream",
}


def function(name: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": f"Runs {name}.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties)[:1],
            "additionalProperties": False,
        },
    }


TOOLS: list[dict[str, Any]] = [
    function("exec_command", cmd="string", workdir="string", yield_time_ms="number"),
    function("write_stdin", session_id="number", chars="string"),
    function("view_image", path="string"),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
    },
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Tools in the mcp__files namespace.",
        "tools": [function("read_file", path="string"), function("list", path="string")],
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


def body(*items: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A turn of Codex; ``items`` follow the opening messages."""
    opening = [
        message("developer", "<permissions instructions>sandboxed</permissions instructions>"),
        message(
            "user", "# AGENTS.md instructions", "<environment_context>/work</environment_context>"
        ),
        message("user", "fix the bug"),
    ]
    return {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [*opening, *items],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"x-codex-installation-id": "1"},
        "text": {"verbosity": "low"},
        **changes,
    }


LITE: dict[str, Any] = body(
    {"type": "additional_tools", "role": "developer", "tools": [
        {"type": "namespace", "name": "functions", "description": "", "tools": TOOLS[:4]},
    ]},
    instructions="",
    tools=None,
)  # fmt: skip
"""A body in lite mode: tools come as an item, in the default namespace."""
