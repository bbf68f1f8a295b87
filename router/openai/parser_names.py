"""The values of keys in the section ``api`` of the configuration."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_args",
    "deepseek_v3",
    "deepseek_v31",
    "qwen3_coder",
    "gemma4",
]
"""Values of ``api.tool_parser``."""

ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "gemma4"]
"""Values of ``api.reasoning_parser``."""

ReasoningFields = Literal["both", "reasoning", "reasoning_content"]
"""Values of ``api.reasoning_field``."""

UnknownFields = Literal["ignore", "refuse"]
"""Values of ``api.unknown_fields``."""

GenerationConfigUse = Literal["auto", "none"]
"""Values of ``api.generation_config``."""
