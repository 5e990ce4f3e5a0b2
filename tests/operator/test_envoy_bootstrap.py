"""Envoy's bootstrap configuration: its content, and that Envoy accepts it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers as wire
from tandem_contract.api_paths import ApiPaths
from tandem_local.ports import free_port
from tandem_local.router import find_envoy
from tandem_operator.routing.envoy.bootstrap import READY, EnvoySettings, envoy_bootstrap
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..epp.real import envoy, until

HOST = "127.0.0.1"

PLAIN = EnvoySettings(epp_address="epp.example", fallback=("10.0.0.1:8000", "decode:8000"))


def manager(bootstrap: Json) -> Json:
    (listener,) = bootstrap["static_resources"]["listeners"]
    config: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return config


def test_every_internal_header_is_dropped_before_any_filter() -> None:
    (extension,) = manager(envoy_bootstrap(PLAIN))["early_header_mutation_extensions"]
    mutations = extension["typed_config"]["mutations"]
    assert {mutation["remove"] for mutation in mutations} == wire.INTERNAL


def test_a_picked_request_goes_to_its_address_and_any_other_to_a_decode_pod() -> None:
    bootstrap = envoy_bootstrap(PLAIN)
    (host,) = manager(bootstrap)["route_config"]["virtual_hosts"]
    either, picked, default, *_, refusal = host["routes"]
    assert (
        either["match"]["path"]
        == picked["match"]["path"]
        == default["match"]["path"]
        == "/v1/chat/completions"
    )
    assert refusal["direct_response"]["status"] == 404
    destination = {"name": wire.DESTINATION_ENDPOINT, "present_match": True}
    alternate = {"name": wire.ALTERNATE_ENDPOINT, "present_match": True}
    assert picked["match"]["headers"] == [destination]
    assert either["match"]["headers"] == [destination, alternate]
    clusters = {c["name"]: c for c in bootstrap["static_resources"]["clusters"]}
    assert clusters[picked["route"]["cluster"]]["type"] == "ORIGINAL_DST"
    specifier = either["route"]["inline_cluster_specifier_plugin"]["extension"]["typed_config"]
    attempts = [group["clusters"][0]["cluster_name"] for group in specifier["priority_groups"]]
    headers = [clusters[name]["original_dst_lb_config"]["http_header_name"] for name in attempts]
    assert headers == [wire.DESTINATION_ENDPOINT, wire.ALTERNATE_ENDPOINT]
    assignment = clusters[default["route"]["cluster"]]["load_assignment"]
    assert [e["endpoint"]["address"] for e in assignment["endpoints"][0]["lb_endpoints"]] == [
        {"socket_address": {"address": "10.0.0.1", "port_value": 8000}},
        {"socket_address": {"address": "decode", "port_value": 8000}},
    ]


def test_the_ext_proc_stream_has_no_timeout() -> None:
    filters = {f["name"]: f for f in manager(envoy_bootstrap(PLAIN))["http_filters"]}
    ext_proc = filters["envoy.filters.http.ext_proc"]["typed_config"]
    mode = ext_proc["processing_mode"]
    assert (mode["response_body_mode"], mode["response_trailer_mode"]) == ("NONE", "SEND")
    assert ext_proc["failure_mode_allow"] is True


def test_a_foreign_epp_gets_response_bodies() -> None:
    settings = replace(PLAIN, body_mode="FULL_DUPLEX_STREAMED", response_bodies=True)
    filters = {f["name"]: f for f in manager(envoy_bootstrap(settings))["http_filters"]}
    mode = filters["envoy.filters.http.ext_proc"]["typed_config"]["processing_mode"]
    assert mode["response_body_mode"] == "FULL_DUPLEX_STREAMED"


def test_only_requests_that_no_pod_has_read_are_retried() -> None:
    (host,) = manager(envoy_bootstrap(PLAIN))["route_config"]["virtual_hosts"]
    either, picked, default = (route["route"]["retry_policy"] for route in host["routes"][:3])
    unsent = {"connect-failure", "refused-stream", "reset-before-request"}
    assert set(either["retry_on"].split(",")) == {*unsent, "retriable-headers"}
    assert either["retriable_headers"] == [{"name": wire.NOT_SENT, "present_match": True}]
    assert set(picked["retry_on"].split(",")) == unsent
    assert set(default["retry_on"].split(",")) == {*unsent, "retriable-status-codes"}
    assert default["retriable_status_codes"] == [503]


def test_the_health_listener_is_exempt_from_limits() -> None:
    assert len(envoy_bootstrap(PLAIN)["static_resources"]["listeners"]) == 1
    settings = replace(PLAIN, health_port=9902, max_heap=1 << 30)
    clients, health = envoy_bootstrap(settings)["static_resources"]["listeners"]
    assert health["address"]["socket_address"]["port_value"] == 9902
    assert health["ignore_global_conn_limit"]
    assert "ignore_global_conn_limit" not in clients


def test_only_answers_that_ended_early_are_logged_by_default_and_to_our_epp_alone() -> None:
    (log,) = manager(envoy_bootstrap(PLAIN))["access_log"]
    failed, gave_up = log["filter"]["or_filter"]["filters"]
    assert failed == {"response_flag_filter": {"flags": ["UC", "UR", "UPE", "SI"]}}
    left, late = gave_up["and_filter"]["filters"]
    assert left == {"response_flag_filter": {"flags": ["DC", "DR"]}}
    assert late["duration_filter"]["comparison"]["value"]["default_value"] == 60_000
    assert (
        manager(envoy_bootstrap(replace(PLAIN, reports_broken_answers=False)))["access_log"] == []
    )


@pytest.mark.parametrize("fallback", [(), ("10.0.0.1",), ("10.0.0.1:99999",)])
def test_an_invalid_fallback_address_raises(fallback: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"fall back|HOST:PORT"):
        envoy_bootstrap(EnvoySettings(epp_address="epp", fallback=fallback))


@pytest.mark.component
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_envoy_accepts_the_bootstrap(tmp_path: Path, mode: BodyMode) -> None:
    settings = EnvoySettings(
        epp_address="127.0.0.1",
        fallback=("127.0.0.1:8000", "localhost:8001"),
        body_mode=mode,
        response_bodies=mode == "FULL_DUPLEX_STREAMED",
        access_log=True,
        api=ApiPaths(["/version", "/custom-1/*/x", "/open/**"]),
        health_port=9902,
        max_heap=1 << 30,
    )
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(envoy_bootstrap(settings)))
    validation = await asyncio.create_subprocess_exec(
        *(str(find_envoy()), "--mode", "validate", "-l", "error", "-c", str(file)),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    _, errors = await validation.communicate()
    assert validation.returncode == 0, errors.decode()


@pytest.mark.component
async def test_the_connection_limit_rejects_clients_but_not_probes(
    tmp_path: Path,
) -> None:
    health = free_port(HOST)
    settings = EnvoySettings(
        epp_address=HOST,
        epp_port=free_port(HOST),
        fallback=(f"{HOST}:{free_port(HOST)}",),
        listen_address=HOST,
        listen_port=free_port(HOST),
        admin_port=free_port(HOST),
        health_port=health,
        max_connections=1,
    )
    async with envoy(tmp_path, settings), aiohttp.ClientSession() as session:
        _, held = await asyncio.open_connection(HOST, settings.listen_port)

        async def turned_away() -> bool:
            reader, writer = await asyncio.open_connection(HOST, settings.listen_port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            try:
                return not await reader.read(1)
            except ConnectionError:
                return True
            finally:
                writer.close()

        await until(turned_away)
        async with session.get(f"http://{HOST}:{health}{READY}") as ready:
            assert ready.status == 200
        held.close()
