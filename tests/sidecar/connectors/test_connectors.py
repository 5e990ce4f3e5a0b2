"""The registry of connectors, and which optional protocols each of them has."""

import pytest

from tandem_contract.connectors import ConnectorName
from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.connectors import (
    NAMES,
    PLANNED,
    ConnectorOptions,
    UnknownConnector,
    check_name,
    make_connector,
)

from .bodies import ATTEMPT, chat


@pytest.mark.parametrize("name", NAMES)
def test_each_name_makes_a_connector_with_its_optional_protocols(name: str) -> None:
    connector = make_connector(name, ConnectorOptions())
    assert check_name(name) == name
    assert (connector.concurrent is None) is name.startswith(("lmcache", "storage"))
    if connector.concurrent is None:
        return
    # Those of NIXL are concurrent only in hand-offs whose prefill engine is known to serve streams.
    always = connector.concurrent.stream_source(ATTEMPT.prefill) is None and name != "mooncake"
    expected = connector.concurrent.expected_kv_hold(ATTEMPT) if always else None
    assert (expected is not None) is (name == "offloading")
    assert (connector.discovery is not None) is (name == "mooncake")


def test_every_name_of_the_contract_is_supported_or_planned() -> None:
    assert sorted(NAMES + PLANNED) == sorted(ConnectorName)
    assert set(PLANNED) == {"p2p-nccl"}


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_connector_is_refused_as_not_supported_yet(name: str) -> None:
    with pytest.raises(UnknownConnector, match="not supported yet: use one of nixl"):
        make_connector(name, ConnectorOptions())


def test_an_unknown_connector_is_refused_with_the_supported_names() -> None:
    with pytest.raises(UnknownConnector, match="no connector 'nixxl': use one of nixl"):
        check_name("nixxl")


def test_the_peer_port_option_sets_the_port_of_the_peer_query() -> None:
    discovery = make_connector("mooncake", ConnectorOptions(peer_port=1234)).discovery
    assert discovery is not None
    query = discovery.peer_query(ATTEMPT)
    assert query is not None
    assert query.address.port == 1234


def test_tokenize_once_can_change_while_requests_run() -> None:
    options = ConnectorOptions(tokenize_once=True)
    connector = make_connector("nixl", options).core
    assert b"return_token_ids" in connector.prefill_body(RequestKind.CHAT, chat("hi"), ATTEMPT)
    options.tokenize_once = False
    assert b"return_token_ids" not in connector.prefill_body(RequestKind.CHAT, chat("hi"), ATTEMPT)
