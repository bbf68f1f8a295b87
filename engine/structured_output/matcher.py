"""One sequence's place in its grammar. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.sampling_params import MAX_LEXER_STATES

_LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class Matcher:
    """Advances by the tokens that are drawn. Not to be used by two threads at once.

    Its limits count what drafts made it look at, too: it keeps a copy from before the first of
    them, and goes back to that if it meets a limit, so that drafts never refuse a text.
    """

    def __init__(self, inner: LLMatcher, vocab: int) -> None:
        self.inner = inner
        self.vocab = vocab  # tokens of its masks: the model's, or more where its tokenizer has more
        self._spare: LLMatcher | None = None  # from before the first draft
        self._since: list[int] = []  # tokens that it has advanced by from there
        self._harmed = False  # drafts led to a limit: no more of them
        self._expected: tuple[int, str] | None = None  # tokens until a problem, and the problem
        self._met = ""

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
        self._since += tokens
        return not self.inner.is_error()

    def advance(self, token: int) -> bool:
        """Advance by a token that was drawn under its mask; False where it has a problem."""
        if self._expected is not None:
            left, problem = self._expected
            if left == 0:
                self._met = problem
                return False
            self._expected = (left - 1, problem)
        self._since.append(token)
        # One that has a problem allows the end of the text, and takes it.
        return not self.inner.is_error() and self.inner.consume_token(token)

    def fitting(self, drafts: Sequence[int]) -> int:
        """How many of ``drafts``, from the first on, could follow; it stays where it is."""
        if self._harmed or self.inner.is_error():
            return 0
        if self._spare is None:
            self._spare, self._since = self.inner.deep_copy(), []
        # One that is asked about a token that there is not would have a problem from then on.
        return self.inner.validate_tokens(list(takewhile(self._known, drafts)))

    def _known(self, token: int) -> bool:
        return 0 <= token < self.vocab

    def recover(self) -> bool:
        """Whether it had a problem that may be due to drafts; it is as if it had seen none then,
        and takes no more of them."""
        if self._spare is None or not self.inner.is_error():
            return False
        self.inner, self._spare, self._harmed = self._spare, None, True
        self.inner.try_consume_tokens(self._since)
        return True

    def expect(self, tokens: int, problem: str) -> None:
        """It will have a problem after so many ``tokens`` of the drafts, if the text takes them."""
        self._expected = (tokens, problem)

    def go_on(self) -> None:
        """A step begins: the text has not come to the problem that was expected."""
        self._expected = None

    @property
    def stopped(self) -> bool:
        """Nothing but the end of the text can follow."""
        return self.inner.is_stopped()

    @property
    def problem(self) -> str:
        """Why it can say nothing of the next token: the grammar is wrong, or too complex to go on.
        Empty: it can."""
        return self._met or self.inner.get_error().removesuffix("<non-verbose/>").strip()
