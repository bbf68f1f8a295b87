"""Against a sorted list, with random additions, removals and looks."""

from __future__ import annotations

from random import Random

from router.fairness.ordered_items import OrderedItems


def test_items_are_those_of_a_sorted_list() -> None:
    random, items = Random(4), OrderedItems[str]()
    expected: list[tuple[float, int, str]] = []
    for number in range(3000):
        if expected and random.random() < 0.5:
            gone = expected.pop(random.randrange(len(expected)))
            items.discard(gone[2])
        else:
            place = float(random.randrange(20))
            items.add(f"item {number}", place, number)
            expected.append((place, number, f"item {number}"))
        expected.sort()
        names = [name for *_, name in expected]
        assert len(items) == len(expected)
        assert items.first(3) == names[:3]
        if expected:
            assert items.head() == expected[0]
    assert items.all() == names


def test_item_that_comes_again_has_its_new_place() -> None:
    items = OrderedItems[str]()
    items.add("a", 1.0, 1)
    items.add("b", 2.0, 2)
    items.discard("a")
    items.add("a", 3.0, 3)
    assert items.all() == items.first(5) == ["b", "a"]


def test_discarded_items_do_not_pile_up() -> None:
    items = OrderedItems[int]()
    items.add(-1, 0.0, -1)  # stays at the top, so that no other entry comes there
    for number in range(1000):
        items.add(number, 1.0, number)
        items.discard(number)
    assert len(items._heap) < 100
