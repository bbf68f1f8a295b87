"""Compiles grammars in a process of its own, where a hostile grammar does no harm.

``grammar_pool`` starts this program with the path of a ``tokenizer.json`` on the command line and a
socket as file descriptor 0 (``router.common.child_program``):

    -> CompileRequest, a line of JSON     <- {"at": place}, at the start of each of its grammars
                                          <- {"verdict": ...}, then it waits for the next request
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from protocol.sampling_params import MAX_GRAMMAR_BYTES, MAX_LEXER_STATES
from router.common.child_program import ChildWire, limit_cpu, short_text

CPU_S = 1.0
MEMORY_BYTES = 512 << 20
"""Memory that one request may add to the process."""

STEPS = 4
"""Output tokens that are tried: rules unfold after the first one and may exceed their limits."""

_LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class CompileRequest(msgspec.Struct, frozen=True):
    """``grammars``: the parts and then the whole of a request's grammar in llguidance's form;
    ``raw``: a single one in Lark's notation or GBNF, as the client wrote it."""

    grammars: tuple[str, ...]
    raw: bool = False


class GrammarVerdict(msgspec.Struct, frozen=True):
    """``problem`` of the grammar at ``place``, empty if an engine can enforce all of them;
    ``grammar``: a raw grammar in llguidance's form."""

    problem: str = ""
    place: int = 0
    costly: bool = False  # too complex, rather than invalid
    grammar: str = ""


class CompileReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The child compiles the grammar ``at`` a place; or the verdict."""

    at: int = 0
    verdict: GrammarVerdict | None = None


def compile_grammars(tokenizer: LLTokenizer, request: CompileRequest) -> Iterator[CompileReply]:
    """Yield a reply for each grammar, and the verdict last."""
    text = ""
    for place, grammar in enumerate(request.grammars):
        yield CompileReply(at=place)
        if request.raw:
            try:
                grammar = text = LLMatcher.grammar_from_lark(any_to_lark(grammar))
            except MemoryError:
                raise
            except Exception as error:  # the library's own, and any of its parser
                yield CompileReply(
                    verdict=GrammarVerdict(short_text(error) or "it is not a grammar", place)
                )
                return
        verdict = find_fault(tokenizer, grammar, place)
        if verdict is not None:
            yield CompileReply(verdict=verdict)
            return
    yield CompileReply(verdict=GrammarVerdict(grammar=text))


def find_fault(tokenizer: LLTokenizer, grammar: str, place: int) -> GrammarVerdict | None:
    """Return what is wrong with a grammar; None if an engine can enforce it."""
    if len(grammar) > MAX_GRAMMAR_BYTES:
        return GrammarVerdict(
            f"it has more than {MAX_GRAMMAR_BYTES} characters", place, costly=True
        )
    invalid, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if invalid:
        return GrammarVerdict(short_text(problems[0]), place)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    for _ in range(STEPS):
        mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
        allowed = int.from_bytes(mask, "little")
        if not allowed or not matcher.consume_token((allowed & -allowed).bit_length() - 1):
            break
    if matcher.is_error():
        why, _, _ = matcher.get_error().removesuffix("<non-verbose/>").partition("; consider")
        return GrammarVerdict(short_text(why), place, costly=True)
    return None


def main() -> None:
    wire = ChildWire()
    try:
        tokenizer = LLTokenizer(Path(sys.argv[1]).read_text())
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        return wire.say_ready(short_text(f"the model's tokenizer: {what}"))

    def compile_request(line: bytes) -> None:
        request = msgspec.json.decode(line, type=CompileRequest)
        limit_cpu(CPU_S)
        for reply in compile_grammars(tokenizer, request):
            if reply.verdict is not None:
                limit_cpu(0)
            wire.send(reply)

    wire.say_ready()
    return wire.serve(MEMORY_BYTES, compile_request)


if __name__ == "__main__":
    main()
