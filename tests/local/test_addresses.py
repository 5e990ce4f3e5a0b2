import errno
import socket

import pytest

from tandem_local import addresses
from tandem_local.errors import SetupError

pytestmark = pytest.mark.component


def test_the_same_pods_get_the_same_addresses() -> None:
    first = addresses.allocate({"a": [8000], "b": [8000]}, "seed")
    assert first == addresses.allocate({"b": [8000], "a": [8000]}, "seed")
    assert len(set(first.values())) == 2


def test_an_address_whose_port_is_in_use_is_not_allocated() -> None:
    address = addresses.allocate({"a": [8000]}, "busy")["a"]
    with socket.create_server((address, 8000)):
        assert not addresses.is_free(address, 8000)
        assert addresses.allocate({"a": [8000]}, "busy")["a"] != address


def test_too_many_pods_are_refused() -> None:
    with pytest.raises(SetupError, match="one machine runs up to"):
        addresses.allocate({str(i): [] for i in range(251)}, "seed")


def test_a_system_without_these_addresses_is_named_with_a_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bind(_self: socket.socket, _address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "no")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(SetupError, match=r"every pod needs its own address .* ifconfig lo0 alias"):
        addresses.allocate({"a": []}, "seed")
