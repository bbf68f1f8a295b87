"""Imports and exports among requests of all kinds: no page is lost, and nobody starves."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.scheduling.sequence import Phase, Sequence
from protocol.block_keys import BLOCK_TOKENS
from tests.engine.scheduler_harness import make_request
from tests.engine.scheduling.test_admission import PROMPTS, RandomOperations


class AnyExchange(RandomOperations):
    """Blocks come and go as well."""

    def __init__(self) -> None:
        super().__init__()
        self.harness.manager.record_changes()
        self.told: set[bytes] = set()

    @rule(prompt=st.sampled_from(PROMPTS), imports=st.booleans())
    def exchange(self, prompt: list[int], imports: bool) -> None:
        scheduler = self.harness.scheduler
        sequence = Sequence(
            self.new(), make_request(prompt), Phase.IMPORTING if imports else Phase.HELD
        )
        if not imports:
            scheduler.export(sequence)
            return
        spare = self.harness.manager.available - len(scheduler.decoding) - len(scheduler.joining)
        cached, blocks = scheduler.import_(sequence)
        assert cached <= blocks <= len(prompt) // BLOCK_TOKENS
        assert blocks - cached <= max(0, spare)

    @precondition(lambda self: self.harness.scheduler.importing)
    @rule(data=st.data())
    def blocks_arrive(self, data: st.DataObject) -> None:
        """Some, and perhaps the last."""
        sequence = data.draw(st.sampled_from(self.harness.scheduler.importing))
        come = data.draw(st.integers(sequence.computed // BLOCK_TOKENS, len(sequence.pages)))
        sequence.computed = come * BLOCK_TOKENS
        if data.draw(st.booleans()):
            self.harness.scheduler.end_import(sequence)
            assert (
                sequence.handle,
                come * BLOCK_TOKENS,
            ) in self.harness.scheduler.take_ended_imports()
            assert self.harness.manager.count_cached(sequence.keys, come) == come

    @invariant()
    def imports_are_where_they_belong(self) -> None:
        scheduler = self.harness.scheduler
        importing = [s for s in scheduler.sequences.values() if s.phase is Phase.IMPORTING]
        assert sorted(importing, key=lambda s: s.handle) == scheduler.importing

    @invariant()
    def what_is_told_is_cached(self) -> None:
        for stored, packed in self.harness.manager.take_changes():
            keys = {packed[i : i + 16] for i in range(0, len(packed), 16)}
            self.told = self.told | keys if stored else self.told - keys
        assert self.told == set(self.harness.manager._page)

    def teardown(self) -> None:
        """Imports whose sources are gone end, and all others as ever."""
        for sequence in list(self.harness.scheduler.importing):
            self.harness.scheduler.end_import(sequence)
        super().teardown()


TestAnyExchange = AnyExchange.TestCase
