"""Explores every state of a model, breadth first, and looks for what must not happen.

    initial --steps, faults--> states --violation?--> the shortest way there is the counterexample
                               states without a step --must be--> clean ends
                               every state --steps alone--> some clean end

A step is what the system does by itself; a fault is what is done to it. A run that is fair (a step
that stays possible is taken at some time) and in which no more faults happen comes to a clean end
exactly if every state leads to one by steps, and no end is unclean: then no set of states without
such an end can keep a run. Tests call ``explore``,
and ``walk`` where there are too many states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Model(Generic[S]):
    """What is explored. Both kinds of successors come with a label that a reader understands."""

    initial: S
    steps: Callable[[S], Iterable[tuple[str, S]]]
    faults: Callable[[S], Iterable[tuple[str, S]]]
    violation: Callable[[S], str]
    """What is wrong in this state, whatever comes next; empty: nothing."""
    unclean: Callable[[S], str]
    """What is wrong if nothing more happens in this state; empty: it is a proper end."""


@dataclass(frozen=True)
class Exploration:
    """What ``explore`` has found. ``trace``: the labels of the way to the fault."""

    states: int
    ends: int
    fault: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        ways = "\n  ".join(("", *self.trace))
        return f"{self.states} states, {self.ends} ends; {self.fault or 'no fault'}{ways}"


class _Graph(Generic[S]):
    """States in the order in which they were found, numbered from 0."""

    def __init__(self, initial: S) -> None:
        self.states = [initial]
        self._numbers = {initial: 0}
        self._found_by: list[tuple[int, str]] = [(0, "")]  # state before, and label
        self.before: list[list[int]] = [[]]  # by steps alone

    def add(self, number: int, label: str, state: S) -> int:
        """Return the number of ``state``, to which ``label`` leads from state ``number``."""
        found = self._numbers.setdefault(state, len(self.states))
        if found == len(self.states):
            self.states.append(state)
            self._found_by.append((number, label))
            self.before.append([])
        return found

    def trace(self, number: int) -> tuple[str, ...]:
        labels = []
        while number:
            number, label = self._found_by[number]
            labels.append(label)
        return tuple(reversed(labels))

    def leading_to(self, ends: Iterable[int]) -> set[int]:
        """Return the states from which steps lead to one of ``ends``."""
        found = set(ends)
        waiting = list(found)
        while waiting:
            new = [n for n in self.before[waiting.pop()] if n not in found]
            found.update(new)
            waiting += new
        return found


def explore(model: Model[S], at_most: int = 5_000_000) -> Exploration:
    """Visit every state that can be reached; stop at the first fault.

    Raises AssertionError beyond ``at_most`` states: a model must be bounded."""
    graph = _Graph(model.initial)
    ends: list[int] = []
    number = 0
    while number < len(graph.states):
        state = graph.states[number]
        if fault := model.violation(state):
            return Exploration(len(graph.states), len(ends), fault, graph.trace(number))
        is_end = True
        for label, after in model.steps(state):
            is_end = False
            graph.before[graph.add(number, label, after)].append(number)
        if is_end and (fault := model.unclean(state)):
            return Exploration(len(graph.states), len(ends), fault, graph.trace(number))
        if is_end:
            ends.append(number)
        for label, after in model.faults(state):
            graph.add(number, f"FAULT {label}", after)
        number += 1
        assert len(graph.states) <= at_most, f"more than {at_most} states: is the model bounded?"
    leading = graph.leading_to(ends)
    stuck = next((n for n in range(len(graph.states)) if n not in leading), None)
    if stuck is not None:
        fault = "no end can be reached from here without another fault"
        return Exploration(len(graph.states), len(ends), fault, graph.trace(stuck))
    return Exploration(len(graph.states), len(ends))


def walk(model: Model[S], seed: int, fault_share: float = 0.1, at_most: int = 10_000) -> str:
    """Take one random way to an end, with more faults than ``explore`` could bear.

    Returns what is wrong, with the labels of the way; empty: nothing. A seed gives the same way."""
    draw = random.Random(seed)
    state, labels = model.initial, [f"seed {seed}"]
    for _ in range(at_most):
        if fault := model.violation(state):
            return "\n  ".join((fault, *labels))
        steps, faults = list(model.steps(state)), list(model.faults(state))
        if not steps:
            fault = model.unclean(state)
            return "\n  ".join((fault, *labels)) if fault else ""
        is_fault = bool(faults) and draw.random() < fault_share
        label, state = draw.choice(faults if is_fault else steps)
        labels.append(label)
    return "\n  ".join((f"no end within {at_most} steps", *labels[-50:]))
