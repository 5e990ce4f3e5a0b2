"""Listening sockets: all addresses, and one port for each rank."""

import socket
from pathlib import Path

import pytest

from tandem_contract.commandline import HostPort
from tandem_sidecar.process.listen import (
    EVERY_ADDRESS,
    CannotListen,
    listen,
    listen_for_admin,
    listen_for_clients,
)

from ..peers import free_pair


def test_every_address_is_that_of_each_family() -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    sockets = listen(HostPort(EVERY_ADDRESS, port), "--listen")
    try:
        families = {each.family for each in sockets}
        has_ipv6 = bool(Path("/proc/net/if_inet6").read_bytes())
        assert families == {socket.AF_INET, *([socket.AF_INET6] if has_ipv6 else [])}
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        for each in sockets:
            each.close()


def test_ranks_listen_on_neighbouring_ports_and_leave_nothing_open() -> None:
    port = free_pair()
    sockets = listen_for_clients(HostPort("127.0.0.1", port), 2)
    assert [each.getsockname()[1] for each in sockets] == [port, port + 1]
    with pytest.raises(CannotListen, match=str(port)):
        listen_for_clients(HostPort("127.0.0.1", port), 2)
    sockets[0].close()
    with pytest.raises(CannotListen, match=str(port + 1)):
        listen_for_clients(HostPort("127.0.0.1", port), 2)
    # The first port was bound, and is free again.
    listen(HostPort("127.0.0.1", port), "--listen")[0].close()
    sockets[1].close()


def test_the_socket_for_drains_belongs_to_the_admin_port() -> None:
    sockets = listen_for_admin(HostPort("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    name = f"\0tandem-drain/127.0.0.1/{port}".encode()
    assert [each.getsockname() for each in sockets] == [("127.0.0.1", port), name]
    sockets[0].close()
    # Only the name is still taken; the port is free again after the error.
    with pytest.raises(CannotListen, match=f"--admin 127.0.0.1:{port}: .*socket for drains"):
        listen_for_admin(HostPort("127.0.0.1", port))
    sockets[1].close()
    for each in listen_for_admin(HostPort("127.0.0.1", port)):
        each.close()
