"""What is asked of the cluster, as metrics: how many requests came, and what they are made of.

arrival: received, prompt --> first token: uncached --> end: output

Refused and queued requests count as they arrive: who sizes the pools must not see only what they
could take. Each choice of a request is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from router.buckets import TOKENS

_LABELS = ["model", "role"]


class Demand:
    """``labels``: the model, and the router's role."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._received = Counter(
            "baton_requests_received",
            "Valid requests at their arrival, refused ones included",
            _LABELS,
            registry=registry,
        ).labels(*labels)

        def histogram(name: str, text: str) -> Histogram:
            name = f"baton_request_{name}_tokens"
            metric = Histogram(name, text, _LABELS, buckets=TOKENS, registry=registry)
            return metric.labels(*labels)

        self._prompt = histogram("prompt", "Tokens in the prompt of a request that arrived")
        self._uncached = histogram(
            "uncached_prompt", "Of them, those that no cache held; known with the first token"
        )
        self._output = histogram("output", "Tokens that a request brought, at its end")

    def refused(self, requests: int) -> None:
        """So many came, and their prompts were not looked at."""
        self._received.inc(requests)

    def arrived(self, prompts: Iterable[int], choices: int) -> None:
        """``choices`` requests for each prompt of so many tokens."""
        for tokens in prompts:
            self._received.inc(choices)
            for _ in range(choices):
                self._prompt.observe(tokens)

    def computed(self, uncached: int) -> None:
        """A first token has come."""
        self._uncached.observe(uncached)

    def answered(self, tokens: int) -> None:
        """A request has ended after its first token."""
        self._output.observe(tokens)
