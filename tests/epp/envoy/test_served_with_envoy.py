"""A gateway tries another of the endpoints that the EPP named, and the EPP learns which served."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.clusters import Json
from tests.gateways.envoy_configs import ISTIO

from ..real import Backend, until
from .test_with_envoy import LONG, SCORERS, Stack, at_rest, post, running

pytestmark = pytest.mark.component

PLUGINS = (*SCORERS, {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 2}})


def tells_in_metadata(bootstrap: Json, decode: list[Backend]) -> None:
    """Istio's settings, and a second try where a pod answers with an error."""
    ISTIO(bootstrap, decode)
    _tries_the_next(bootstrap)


def tells_in_an_attribute(bootstrap: Json, decode: list[Backend]) -> None:
    """The same without metadata of the endpoint that served: the address is an attribute."""
    ISTIO(bootstrap, decode)
    _tries_the_next(bootstrap)
    manager = _manager(bootstrap)
    ext_proc = manager["http_filters"][0]["typed_config"]
    del ext_proc["metadata_options"]["forwarding_namespaces"]
    ext_proc["response_attributes"] = ["upstream.address"]


def _tries_the_next(bootstrap: Json) -> None:
    (host,) = _manager(bootstrap)["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    route["route"]["retry_policy"] = {"retry_on": "5xx", "num_retries": 1}


def _manager(bootstrap: Json) -> Json:
    (listener,) = bootstrap["static_resources"]["listeners"]
    manager: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


@pytest.mark.parametrize("change", [tells_in_metadata, tells_in_an_attribute])
async def test_load_and_prompt_move_to_the_pod_that_served(
    tmp_path: Path, change: Callable[[Json, list[Backend]], None]
) -> None:
    # In clear text: the settings are Istio's without its TLS.
    def clear(bootstrap: Json, decode: list[Backend]) -> None:
        change(bootstrap, decode)
        for cluster in bootstrap["static_resources"]["clusters"]:
            cluster.pop("transport_socket", None)

    async with running(tmp_path, "BUFFERED", clear, PLUGINS) as stack:
        await post(stack, {"model": "m", "prompt": LONG})
        (chosen,) = [each for each in stack.decode if each.received]
        (other,) = [each for each in stack.decode if each is not chosen]
        named = chosen.received[0].headers[wire.DESTINATION_ENDPOINT]
        assert named == f"127.0.0.1:{chosen.port},127.0.0.1:{other.port}"

        chosen.fails = True
        longer = LONG + "another prompt with the same beginning " * 50
        body = {"model": "m", "prompt": longer, "user": "slow"}
        sent = asyncio.create_task(post(stack, body))

        async def is_served_by_the_other() -> bool:
            loads = [await in_flight(stack, each) for each in (chosen, other)]
            return loads == [0, 1]

        await until(is_served_by_the_other)
        assert len(chosen.received) == 2, "it was tried first"
        other.release.set()
        assert (await sent)[:2] == (200, b"first last")
        await until(lambda: at_rest(stack))

        # `chosen` caches only the beginning.
        chosen.fails = False
        await post(stack, {"model": "m", "prompt": longer})
        assert len(chosen.received) == 2
        request = other.received[-1]
        assert request.headers[wire.DESTINATION_ENDPOINT].startswith(f"127.0.0.1:{other.port},")
        assert wire.PREFILLER_HOST_PORT not in request.headers


async def in_flight(stack: Stack, backend: Backend) -> float:
    return (await stack.epp.figures())[f'tandem_epp_in_flight{{backend="{backend.name}"}}']
