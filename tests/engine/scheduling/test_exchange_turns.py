"""Imports and exports among requests of all kinds: no page is lost, and nobody starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.scheduling.sequence import Phase, Sequence
from protocol.block_keys import BLOCK_TOKENS
from tests.engine.scheduling.test_turns import PROMPTS, AnyTurn
from tests.engine.turns import wish


class AnyExchange(AnyTurn):
    """Blocks come and go as well."""

    def __init__(self) -> None:
        super().__init__()
        self.turns.manager.report()
        self.told: set[bytes] = set()

    @rule(prompt=st.sampled_from(PROMPTS), imports=st.booleans())
    def exchange(self, prompt: list[int], imports: bool) -> None:
        scheduler = self.turns.scheduler
        sequence = Sequence(self.new(), wish(prompt), Phase.IMPORTING if imports else Phase.HELD)
        if not imports:
            scheduler.export(sequence)
            return
        spare = self.turns.manager.available - len(scheduler.decoding) - len(scheduler.joining)
        cached, blocks = scheduler.import_(sequence)
        assert cached <= blocks <= len(prompt) // BLOCK_TOKENS
        assert blocks - cached <= max(0, spare)

    @precondition(lambda self: self.turns.scheduler.importing)
    @rule(data=st.data())
    def blocks_arrive(self, data: st.DataObject) -> None:
        """Some, and perhaps the last."""
        sequence = data.draw(st.sampled_from(self.turns.scheduler.importing))
        come = data.draw(st.integers(sequence.computed // BLOCK_TOKENS, len(sequence.pages)))
        sequence.computed = come * BLOCK_TOKENS
        if data.draw(st.booleans()):
            self.turns.scheduler.adopt(sequence)
            assert (sequence.handle, come * BLOCK_TOKENS) in self.turns.scheduler.take_adopted()
            assert self.turns.manager.cached(sequence.keys, come) == come

    @invariant()
    def imports_are_where_they_belong(self) -> None:
        scheduler = self.turns.scheduler
        importing = [s for s in scheduler.sequences.values() if s.phase is Phase.IMPORTING]
        assert sorted(importing, key=lambda s: s.handle) == scheduler.importing

    @invariant()
    def what_is_told_is_cached(self) -> None:
        for stored, packed in self.turns.manager.take_changes():
            keys = {packed[i : i + 16] for i in range(0, len(packed), 16)}
            self.told = self.told | keys if stored else self.told - keys
        assert self.told == set(self.turns.manager._page)

    def teardown(self) -> None:
        """Imports whose sources are gone end, and all others as ever."""
        for sequence in list(self.turns.scheduler.importing):
            self.turns.scheduler.adopt(sequence)
        super().teardown()


AnyExchange.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyExchange = AnyExchange.TestCase
