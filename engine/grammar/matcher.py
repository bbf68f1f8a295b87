"""One sequence's place in its grammar. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.sampling import MAX_LEXER_STATES

_LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class Matcher:
    """Advances by the tokens that are drawn. Not to be used by two threads at once."""

    def __init__(self, inner: LLMatcher, vocab: int) -> None:
        self.inner = inner
        self.vocab = vocab  # tokens of its masks: the model's, or more where its tokenizer has more

    @classmethod
    def compile(cls, tokenizer: LLTokenizer, grammar: str) -> Matcher:
        """At the start of ``grammar``. ``problem`` says what is wrong with it, if anything is."""
        inner = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        return cls(inner, tokenizer.vocab_size)

    def copy(self) -> Matcher:
        """At the same place, and on its own from here; takes microseconds."""
        return Matcher(self.inner.deep_copy(), self.vocab)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by ``tokens``; False where they do not fit, and it stays where it was."""
        taken = self.inner.try_consume_tokens(list(tokens))
        if taken < len(tokens):
            self.inner.rollback(taken)
            return False
        return not self.inner.is_error()

    def advance(self, token: int) -> bool:
        """Advance by a token that was drawn under its mask; False where it has a problem."""
        # One that has a problem allows the end of the text, and takes it.
        return not self.inner.is_error() and self.inner.consume_token(token)

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, could follow; it stays where it is."""
        known = list(takewhile(lambda token: 0 <= token < self.vocab, tokens))
        # One that is asked about others would have a problem from then on.
        return self.inner.validate_tokens(known)

    @property
    def stopped(self) -> bool:
        """Nothing but the end of the text can follow."""
        return self.inner.is_stopped()

    @property
    def problem(self) -> str:
        """Why it can say nothing of the next token: the grammar is wrong, or too complex to go on.
        Empty: it can."""
        return self.inner.get_error().removesuffix("<non-verbose/>").strip()
