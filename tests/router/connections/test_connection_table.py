"""Which connections are admitted, and which give way to them."""

from __future__ import annotations

from random import Random

from router.connections.connection_table import (
    ConnectionSlot,
    ConnectionTable,
    address_group,
    connection_limits,
)


class Clients:
    """Opens connections at a table, and knows which of them were closed for others."""

    def __init__(self, total: int, per_address: int | None = None) -> None:
        self.table = ConnectionTable(connection_limits(total, per_address))
        self.evicted: list[ConnectionSlot] = []

    def connect(self, host: str = "10.0.0.1") -> ConnectionSlot | None:
        slot = self.table.admit(host)
        if slot is not None:
            slot.evict = lambda: self.evicted.append(slot)
        return slot

    def busy(self, host: str = "10.0.0.1") -> ConnectionSlot:
        slot = self.connect(host)
        assert slot is not None
        slot.mark_busy()
        return slot


def test_longest_idle_connection_gives_way() -> None:
    clients = Clients(4, per_address=4)
    busy = clients.busy()
    first, second = clients.connect(), clients.connect()
    busy.mark_idle()  # later than the others, although it was opened before them
    assert clients.connect() and not clients.evicted
    assert clients.connect("10.0.0.2") and clients.evicted == [first]
    assert clients.connect("10.0.0.2") and clients.evicted == [first, second]
    assert clients.connect("10.0.0.2") and clients.evicted == [first, second, busy]
    assert (clients.table.open, clients.table.evicted) == (4, 3)


def test_busy_connections_stay_and_the_newcomer_is_refused() -> None:
    clients = Clients(3, per_address=3)
    slots = [clients.busy() for _ in range(3)]
    assert clients.connect("10.0.0.2") is None
    assert clients.table.refused == {"all": 1}
    slots[0].release()
    slots[0].release()
    assert clients.connect("10.0.0.2") is not None and not clients.evicted


def test_one_address_does_not_take_all() -> None:
    clients = Clients(8)
    for _ in range(6):
        clients.busy()
    assert clients.connect() is None and clients.table.refused == {"address": 1}
    other = clients.busy("10.0.0.2")
    assert clients.connect("2001:db8::1") is not None
    assert clients.table.open == 8 and not clients.evicted
    other.release()
    assert clients.connect() is None


def test_address_at_its_limit_loses_its_own_idle_connection() -> None:
    clients = Clients(8, per_address=2)
    other = clients.connect("10.0.0.2")
    mine = clients.connect()
    clients.busy()
    assert clients.connect() is not None
    assert clients.evicted == [mine] and other is not None and clients.table.open == 3


def test_loopback_may_take_all() -> None:
    clients = Clients(4)
    for _ in range(4):
        clients.busy("127.0.0.1")
    assert clients.table.open == 4


def test_addresses_of_one_site_count_together() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff:1")
    assert address_group("2001:db8::1") != address_group("2001:db8:0:1::1")
    assert address_group("fe80::1%eth0") == address_group("fe80::2%eth1")
    assert address_group("10.0.0.1") != address_group("10.0.0.2")


def test_slots_are_conserved_over_any_history() -> None:
    """What is open and idle equals a simple count after every step, and nothing is left."""
    random, clients = Random(7), Clients(20, per_address=8)
    held: dict[ConnectionSlot, bool] = {}  # whether it is idle
    for _ in range(5000):
        action = random.random()
        if action < 0.45:
            slot = clients.connect(f"10.0.0.{random.randrange(5)}")
            for gone in clients.evicted:
                assert held.pop(gone), "only idle ones give way"
            clients.evicted.clear()
            if slot is not None:
                held[slot] = True
        elif held:
            slot = random.choice(list(held))
            if action < 0.65:
                slot.mark_busy()
                held[slot] = False
            elif action < 0.8:
                slot.mark_idle()
                held[slot] = True
            else:
                slot.release()
                del held[slot]
                slot.mark_idle()  # a late report changes nothing
        assert clients.table.open == len(held) <= 20
        assert clients.table.idle == sum(held.values())
    for slot in held:
        slot.release()
    assert (clients.table.open, clients.table.idle) == (0, 0) and not clients.table._addresses
