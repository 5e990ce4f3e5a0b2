"""Connectors by name."""

import pytest

from tandem_sidecar.connectors import COMING, NAMES, UnknownConnector, check, make

from .bodies import ATTEMPT


@pytest.mark.parametrize("name", NAMES)
def test_each_name_makes_a_connector(name: str) -> None:
    connector = make(name, tokenize_once=True, peer_port=None)
    assert check(name) == name
    assert connector.together is (name in ("mooncake", "offloading"))


@pytest.mark.parametrize("name", COMING)
def test_what_is_coming_says_so(name: str) -> None:
    with pytest.raises(UnknownConnector, match="not supported yet: use one of nixl"):
        make(name, tokenize_once=True, peer_port=None)


def test_what_is_unknown_says_what_there_is() -> None:
    with pytest.raises(UnknownConnector, match="no connector 'nixxl': use one of nixl"):
        check("nixxl")


def test_the_peer_port_goes_to_who_asks_there() -> None:
    inquiry = make("mooncake", tokenize_once=True, peer_port=1234).inquiry(ATTEMPT)
    assert inquiry is not None
    assert inquiry.address.port == 1234
