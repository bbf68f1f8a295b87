"""The position of one sequence in its grammar. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.sampling_params import MAX_LEXER_STATES

_LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class GrammarMatcher:
    """Advances by the tokens that are drawn. The sequence owns it; it is not thread-safe.

    llguidance counts the work for draft tokens towards the limits, too. The matcher therefore keeps
    a copy from before the first drafts and returns to it when a limit is met, so that drafts never
    make it refuse a text.
    """

    def __init__(self, inner: LLMatcher, vocab: int) -> None:
        self.inner = inner
        self.vocab = vocab  # tokens of its masks: the model's, or more where its tokenizer has more
        self._before_drafts: LLMatcher | None = None
        self._tokens_since: list[int] = []  # tokens accepted after ``_before_drafts``
        self._refuses_drafts = False  # drafts led to a limit
        self._expected: tuple[int, str] | None = None  # tokens until a problem, and the problem
        self._met = ""  # the expected problem, once the text has come to it

    @classmethod
    def compile(cls, tokenizer: LLTokenizer, grammar: str) -> GrammarMatcher:
        """Return a matcher at the start of ``grammar``; its ``problem`` is the error, if any."""
        inner = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        return cls(inner, tokenizer.vocab_size)

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher at the same position; takes microseconds."""
        return GrammarMatcher(self.inner.deep_copy(), self.vocab)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by ``tokens``; return False where they do not match, without a change."""
        taken = self.inner.try_consume_tokens(list(tokens))
        if taken < len(tokens):
            self.inner.rollback(taken)
            return False
        self._tokens_since += tokens
        return not self.inner.is_error()

    def advance(self, token: int) -> bool:
        """Advance by a token that was drawn under the mask; return False on a problem."""
        if self._expected is not None:
            left, problem = self._expected
            if left == 0:
                self._met = problem
                return False
            self._expected = (left - 1, problem)
        self._tokens_since.append(token)
        # A matcher with a problem allows the end of the text, and takes it.
        return not self.inner.is_error() and self.inner.consume_token(token)

    def count_matching(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, from the first on, match; does not advance."""
        if self._refuses_drafts or self.inner.is_error():
            return 0
        if self._before_drafts is None:
            self._before_drafts, self._tokens_since = self.inner.deep_copy(), []
        # llguidance goes into an error state when asked about a token that does not exist.
        known = takewhile(lambda token: 0 <= token < self.vocab, drafts)
        return self.inner.validate_tokens(list(known))

    def recover_from_drafts(self) -> bool:
        """Return whether there was a problem that may be due to drafts. The matcher is then as if
        it had seen no drafts, and refuses them from now on."""
        if self._before_drafts is None or not self.inner.is_error():
            return False
        self.inner, self._before_drafts, self._refuses_drafts = self._before_drafts, None, True
        self.inner.try_consume_tokens(self._tokens_since)
        return True

    def expect_problem(self, tokens: int, problem: str) -> None:
        """Record that ``problem`` follows after this number of draft tokens, if the text takes
        them."""
        self._expected = (tokens, problem)

    def clear_expected_problem(self) -> None:
        """Begin a step: the text has not come to the problem that was expected."""
        self._expected = None

    @property
    def stopped(self) -> bool:
        """Whether only the end of the text can follow."""
        return self.inner.is_stopped()

    @property
    def problem(self) -> str:
        """Why there is no mask for the next token: the grammar is wrong, or too complex to go on.
        Empty if there is no problem."""
        return self._met or self.inner.get_error().removesuffix("<non-verbose/>").strip()
