"""Which markers a template shows, and where the output of a prompt begins."""

from __future__ import annotations

import pytest

from router.openai.reasoning.reasoning_syntax import (
    DEEPSEEK_R1,
    GEMMA4,
    MISTRAL,
    QWEN3,
    ReasoningStart,
    ReasoningSyntax,
    detect_reasoning,
    find_reasoning,
    reasoning_start,
)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{{ content.split('</think>')[-1] }}<|Assistant|><think>\\n", QWEN3),
        ("{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}", QWEN3),
        ("[INST]{{ content }}[/INST][THINK]{{ t }}[/THINK]", MISTRAL),
        ("{{ '<|channel>thought\\n' + reasoning + '<channel|>' }}", GEMMA4),
        ("<|im_start|>{{ message.content }}<|im_end|>", None),
    ],
)
def test_the_template_shows_the_markers(template: str, syntax: ReasoningSyntax | None) -> None:
    assert detect_reasoning(template) == syntax
    assert find_reasoning("auto", template) == syntax
    assert find_reasoning("none", template) is None
    assert find_reasoning("deepseek_r1", template) == DEEPSEEK_R1


@pytest.mark.parametrize(
    ("syntax", "tail", "start"),
    [
        (QWEN3, "<|im_start|>assistant\n<think>\n", "open"),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        (QWEN3, "<|im_start|>assistant\n", "waiting"),
        (QWEN3, "user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "waiting"),
        (QWEN3, "<think>\nold\n</think>\n\nyes<|im_end|>\n<|im_start|>assistant\n", "waiting"),
        (QWEN3, "<|Assistant|></think>", "closed"),
        (DEEPSEEK_R1, "<|Assistant|>", "open"),
        (DEEPSEEK_R1, "<|Assistant|></think>", "closed"),
        (MISTRAL, "[/INST]", "waiting"),
        (MISTRAL, "[/INST][THINK]", "open"),
        (GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>", "closed"),
        (GEMMA4, "<|turn>model\n<|channel>thought\n", "open"),
        (GEMMA4, "<|turn>model\n", "waiting"),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_output_begins(
    syntax: ReasoningSyntax, tail: str, start: ReasoningStart
) -> None:
    assert reasoning_start(syntax, tail) == start


def test_a_continued_answer_is_no_reasoning() -> None:
    assert reasoning_start(DEEPSEEK_R1, "<|Assistant|>The", is_over=True) == "waiting"
