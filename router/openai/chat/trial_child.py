"""Tries grammars out in a process of its own, where a hostile one does no harm.

Its socket is file descriptor 0: the path of a ``tokenizer.json`` on the command line, then

    -> Trial, a line of JSON        <- {"at": place}, as it begins with each of the grammars
                                    <- {"verdict": ...}, and it waits for the next

One that takes too much CPU or memory ends the process: by SIGPROF, or as memory runs out. It ends
with its parent, too: what it tries is over in CPU_S, and then it finds the socket closed.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from protocol.sampling_params import MAX_GRAMMAR_BYTES, MAX_LEXER_STATES

CPU_S = 1.0
MEMORY_BYTES = 512 << 20
"""What one trial may add to the process."""

STEPS = 4
"""Tokens of an output that are tried: after the first, rules unfold and find their limits."""

_LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class Trial(msgspec.Struct, frozen=True):
    """``grammars``: the parts and then the whole of a request's grammar, as llguidance takes them;
    ``raw``: there is one, in Lark's notation or GBNF as the client wrote it."""

    grammars: tuple[str, ...]
    raw: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """``wrong``: what is, with the grammar at ``place``; empty: nothing. ``grammar``: of a raw one,
    as llguidance takes it."""

    wrong: str = ""
    place: int = 0
    costly: bool = False  # too complex or too much work, rather than no grammar
    grammar: str = ""


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the child says: that it is ready or at work ``at`` a place, or the verdict."""

    at: int = 0
    verdict: Verdict | None = None


def tried(tokenizer: LLTokenizer, trial: Trial) -> Iterator[Word]:
    """Where it is, and the verdict at last."""
    text = ""
    for place, grammar in enumerate(trial.grammars):
        yield Word(at=place)
        if trial.raw:
            try:
                grammar = text = LLMatcher.grammar_from_lark(any_to_lark(grammar))
            except MemoryError:
                raise
            except Exception as error:  # the library's own, and whatever its parser trips over
                yield Word(verdict=Verdict(_short(error) or "it is no grammar", place))
                return
        verdict = fault(tokenizer, grammar, place)
        if verdict is not None:
            yield Word(verdict=verdict)
            return
    yield Word(verdict=Verdict(grammar=text))


def fault(tokenizer: LLTokenizer, grammar: str, place: int) -> Verdict | None:
    """None: an engine can hold an output to it."""
    if len(grammar) > MAX_GRAMMAR_BYTES:
        return Verdict(f"it has more than {MAX_GRAMMAR_BYTES} characters", place, costly=True)
    wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        return Verdict(_short(problems[0]), place)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    for _ in range(STEPS):
        mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
        allowed = int.from_bytes(mask, "little")
        if not allowed or not matcher.consume_token((allowed & -allowed).bit_length() - 1):
            break
    if matcher.is_error():
        why, _, _ = matcher.get_error().removesuffix("<non-verbose/>").partition("; consider")
        return Verdict(_short(why), place, costly=True)
    return None


def _short(what: object) -> str:
    return " ".join(str(what).split())[:500]


def _serve(lines: BufferedReader, wire: socket.socket, tokenizer: LLTokenizer) -> None:
    most = _size() + MEMORY_BYTES
    while line := lines.readline():
        trial = msgspec.json.decode(line, type=Trial)
        size = _size()
        if size > most:  # what earlier ones left behind: a fresh process takes its place
            return
        _bound_memory(size + MEMORY_BYTES)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        for word in tried(tokenizer, trial):
            if word.verdict is not None:
                signal.setitimer(signal.ITIMER_PROF, 0)
            _say(wire, word)


def _bound_memory(most: int) -> None:
    """Or less, where the operator has set less."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))


def _say(wire: socket.socket, word: Word) -> None:
    wire.sendall(msgspec.json.encode(word) + b"\n")


def _size() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wire = socket.socket(fileno=0)
    try:
        tokenizer = LLTokenizer(Path(sys.argv[1]).read_text())
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        return _say(wire, Word(verdict=Verdict(_short(f"the model's tokenizer: {what}"))))
    _say(wire, Word())
    return _serve(wire.makefile("rb"), wire, tokenizer)


if __name__ == "__main__":
    main()
