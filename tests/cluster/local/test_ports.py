import socket

import pytest

from cluster.local import ports
from protocol.errors import StartupError
from router.http.server import open_listening_sockets


def test_taken_port_gives_a_later_one() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        assert not ports.is_port_free("127.0.0.1", taken)
        assert ports.first_free_port("127.0.0.1", taken) > taken


def test_free_port_is_returned_unchanged() -> None:
    (port,) = ports.free_ports("127.0.0.1", 1)
    assert ports.first_free_port("127.0.0.1", port) == port


def test_any_free_ports_differ() -> None:
    assert len(set(ports.free_ports("127.0.0.1", 5))) == 5


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(StartupError, match="65535"):
        ports.first_free_port("127.0.0.1", port)


def test_held_port_is_taken_but_can_be_shared() -> None:
    [port] = ports.free_ports("127.0.0.1", 1)
    held = ports.hold_port("127.0.0.1", port)
    try:
        assert not ports.is_port_free("127.0.0.1", port)
        assert ports.first_free_port("127.0.0.1", port) != port
        for each in open_listening_sockets("127.0.0.1", port):
            each.close()
        with pytest.raises(StartupError, match="Address already in use"):
            open_listening_sockets("127.0.0.1", port, shared=False)
    finally:
        for each in held:
            each.close()
    assert ports.is_port_free("127.0.0.1", port)
