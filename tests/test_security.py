"""docs/run/security.md: its tables have every port, every flag that opens one, and the limits."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tandem_cli.main import main as tandem
from tandem_contract import ports
from tandem_contract.commandline import HOST_PORT
from tandem_contract.memory_limit import LARGEST_DEFAULT
from tandem_contract.web_connections import CONNECTIONS, IDLE_SECONDS
from tandem_engine import intake
from tandem_engine.config import EngineConfig
from tandem_engine.main import main as engine
from tandem_engine.settings import Settings as EngineSettings
from tandem_engine.transfer.wire import DEFAULT_LIMITS
from tandem_epp.main import main as epp
from tandem_epp.replicas.peers import listener as peers
from tandem_epp.replicas.peers.messages import MAX_MESSAGE
from tandem_epp.server.http2.limits import Limits as Http2Limits
from tandem_epp.settings import Settings as EppSettings
from tandem_http1.client import Limits as ProxyLimits
from tandem_kvstore.server.app import StoreSettings
from tandem_operator.main import main as operator
from tandem_router.main import main as router
from tandem_sidecar.main import main as sidecar

PAGE = Path(__file__).parent.parent / "docs/run/security.md"
COMMANDS = {
    "tandem": tandem,
    "tandem-engine": engine,
    "tandem-epp": epp,
    "tandem-operator": operator,
    "tandem-router": router,
    "tandem-sidecar": sidecar,
}
OF_OTHERS = {"tandem-epp --peers", "tandem-router --peers"}
"""Flags with addresses that the process connects to."""
ROW = re.compile(r"^\| (\d+) \| ([^|]*) \|")


def rows() -> list[tuple[int, str]]:
    """Port and component of each row."""
    matches = (ROW.match(line) for line in PAGE.read_text().splitlines())
    return [(int(match[1]), match[2]) for match in matches if match]


@pytest.mark.parametrize("name", [name for name in vars(ports) if name.isupper()])
def test_every_port_is_in_the_table(name: str) -> None:
    if name != "LAST":
        assert getattr(ports, name) in {port for port, _ in rows()}


def listening(name: str, command: click.Command) -> Iterator[tuple[str, int]]:
    """Flags with an address to listen on, with the command's name, and their default port."""
    for parameter in command.params:
        flag = f"{name} {parameter.opts[0]}"
        if parameter.type is HOST_PORT and flag not in OF_OTHERS:
            yield flag, int(str(parameter.default).rpartition(":")[2])
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            yield from listening(f"{name} {child}", inner)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_opens_a_port_is_in_the_table(name: str) -> None:
    shown = {(flag, port) for port, text in rows() for flag in re.findall(r"`([^`]*)`", text)}
    opened = set(listening(name, COMMANDS[name]))
    if name == "tandem-engine":
        opened = {("tandem-engine --port", ports.ENGINE_PREFILL)}
    assert opened <= shown


def mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


PROXY, HTTP2, EPP = ProxyLimits(), Http2Limits(), EppSettings(config=Path())
ENGINE = EngineSettings(EngineConfig(Path()), ())
STORE = StoreSettings(Path())
LIMITS = {
    "sidecar and router, API": (
        *(f"{PROXY.connections:,}", f"{PROXY.idle_seconds:,.0f} s", mib(PROXY.body)),
        *(f"{PROXY.request_seconds:.0f} s", mib(LARGEST_DEFAULT), "`--max-connections`"),
    ),
    "EPP, ext_proc and health": (
        *(f"{HTTP2.connections:,}", f"{HTTP2.idle_seconds:,.0f} s"),
        *(mib(EPP.max_body), f"{EPP.body_timeout:.0f} s"),
    ),
    "reference engine, API": (
        *(f"{intake.CONNECTIONS:,}", f"{intake.REQUESTS:,}", f"{IDLE_SECONDS:.0f} s"),
        *(mib(ENGINE.body_limit), f"{intake.IDLE_SECONDS:.0f} s", f"{intake.BODY_SECONDS:.0f} s"),
        mib(LARGEST_DEFAULT),
    ),
    "reference engine, KV transfer": (
        *(f"{DEFAULT_LIMITS.connections}", f"{DEFAULT_LIMITS.idle:.0f} s"),
        f"{DEFAULT_LIMITS.handshake:.0f} s",
    ),
    "`tandem store`": (
        *(f"{STORE.max_connections:,}", f"{STORE.idle_timeout:.0f} s"),
        *(f"{STORE.max_object_bytes >> 30} GiB", f"{STORE.body_timeout:.0f} s"),
    ),
    "metrics, health and admin pages": (f"{CONNECTIONS}", f"{IDLE_SECONDS:.0f} s"),
    "EPP's peers": (
        *(f"{peers.MAX_CONNECTIONS}", f"{peers.MAX_HANDSHAKES}", mib(MAX_MESSAGE)),
        *(f"{peers.SILENCE_SECONDS:.0f} s", f"{peers.HANDSHAKE_SECONDS:.0f} s"),
    ),
}


@pytest.mark.parametrize("server", LIMITS)
def test_the_table_of_bounds_has_the_limits_of_the_code(server: str) -> None:
    (row,) = (x for x in PAGE.read_text().splitlines() if x.startswith(f"| {server} |"))
    assert [text for text in LIMITS[server] if text not in row] == []


HTTP2_LIMITS = {
    "connections, streams on each": (f"{HTTP2.connections}, {HTTP2.streams}",),
    "header section": (f"{HTTP2.header_block >> 10} KiB; {HTTP2.continuations + 1} |",),
    "frame |": (f"{HTTP2.frame >> 10} KiB",),
    "sent and not yet read": (mib(HTTP2.stream_window), mib(HTTP2.connection_window)),
    "answers that wait": (f"{HTTP2.stream_unsent >> 10} KiB", mib(HTTP2.connection_unsent)),
    "frames with little": (
        *(f"{HTTP2.frames_burst:.0f} at once", f"{HTTP2.frames_per_second:.0f} per second"),
    ),
    "streams that the client resets": (
        *(f"{HTTP2.resets_burst:.0f} at once", f"{HTTP2.resets_per_second:.0f} per second"),
    ),
}


@pytest.mark.parametrize("bound", HTTP2_LIMITS)
def test_the_bounds_of_the_ext_proc_server_are_those_of_the_code(bound: str) -> None:
    page = PAGE.with_name("picker.md").read_text()
    (row,) = (x for x in page.splitlines() if x.startswith(f"| {bound}"))
    assert [text for text in HTTP2_LIMITS[bound] if text not in row] == []
