"""What the doctor says about the TCP ports at which UCX takes connections."""

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_doctor import processes, side_channel
from tandem_doctor.data_ports import check_data_ports, parse_range
from tandem_doctor.facts import Engine, EngineCommand, MachinePorts
from tandem_doctor.findings import Finding, Severity

MACHINE = MachinePorts((32_768, 60_999), frozenset({8000, 20_001}))
RANGE = {"UCX_TCP_PORT_RANGE": "20000-20999", "UCX_TLS": "all"}


def engine(environment: dict[str, str], **flags: str) -> Engine:
    command = EngineCommand(flags, {"kv_connector": "NixlConnector"}, environment)
    return Engine("p-0", Role.PREFILL, "m", "10.0.0.2:8000", command=command)


def findings(checked: Engine, machine: MachinePorts | None = MACHINE) -> list[Finding]:
    return list(check_data_ports(checked, machine))


def test_a_range_that_is_free_is_reported_with_what_listens() -> None:
    [finding] = findings(engine(RANGE))
    assert (finding.severity, finding.check) == (Severity.OK, "data ports")
    [finding] = findings(replace(engine(RANGE), listening=frozenset({8000, 20_123, 20_456})))
    assert finding.detail == "UCX may listen at 20000-20999, and listens at 20123, 20456"


@pytest.mark.parametrize(
    ("environment", "flags", "severity", "text"),
    [
        ({"UCX_TLS": "all"}, {}, Severity.WARNING, "the kernel chooses"),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "many"}, {}, Severity.BROKEN, "no range"),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "20000-70000"}, {}, Severity.BROKEN, "no range"),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "30000-33000"}, {}, Severity.WARNING, "ephemeral"),
        (RANGE, {"port": "20007"}, Severity.WARNING, "20007, the port of the engine"),
        (
            {**RANGE, "VLLM_NIXL_SIDE_CHANNEL_PORT": "20600"}, {}, Severity.WARNING,
            "20600, the port of the side channel",
        ),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "5550-5590"}, {}, Severity.WARNING, "KV events"),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "20000-20009"}, {}, Severity.WARNING, "9 of the 10 ports"),
        ({**RANGE, "UCX_TCP_PORT_RANGE": "20001"}, {}, Severity.BROKEN, "0 of the 1 ports"),
    ],
)  # fmt: skip
def test_each_problem(
    environment: dict[str, str], flags: dict[str, str], severity: Severity, text: str
) -> None:
    [finding] = findings(engine(environment, **flags))
    assert finding.severity is severity
    assert text in finding.detail
    assert finding.fix


def test_ports_of_other_machines_and_of_the_reference_engine_are_not_judged() -> None:
    assert findings(engine({**RANGE, "UCX_TCP_PORT_RANGE": "40000-40999"}), None)[0].fix == ""
    assert findings(engine({"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"})) == []


def test_a_closed_range_is_named_with_both_causes() -> None:
    [finding] = findings(replace(engine(RANGE), data_port_error="no answer within 3 s"), None)
    assert finding.severity is Severity.UNKNOWN
    assert "20000-20999: no answer within 3 s from here" in finding.detail
    assert "firewalls" in finding.fix
    assert "NetworkPolicy" in finding.fix


@pytest.mark.parametrize(
    ("text", "ports"),
    [("20000-20001", [20_000, 20_001]), ("7", [7]), ("2-1", None), ("-2", None), ("1-", None)],
)
def test_ranges_as_ucx_reads_them(text: str, ports: list[int] | None) -> None:
    allowed = parse_range(text)
    assert (None if allowed is None else list(allowed)) == ports


@pytest.mark.component
async def test_a_host_that_refuses_has_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert await side_channel.firewall_error(HostPort("127.0.0.1", port)) is None
    assert await side_channel.firewall_error(HostPort("127.0.0.1", port)) is None
    monkeypatch.setattr(side_channel, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        # The kernel drops what comes to a full backlog, as a firewall does.
        with socket.create_connection(address):
            assert await side_channel.firewall_error(HostPort(*address)) == "no answer within 0 s"


@pytest.mark.component
async def test_ports_of_this_machine(tmp_path: Path) -> None:
    """A process with UCX's library mapped, as the doctor recognizes an engine, and a listener."""
    library = tmp_path / "libucp.so.0"
    library.write_bytes(bytes(4096))
    code = """
import mmap, socket, sys
with open(sys.argv[1], "rb") as library:
    kept = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, library), stdin=PIPE, stdout=PIPE, process_group=0
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        assert processes.listening_ports(process.pid) == {port}
        machine = processes.machine_ports()
        assert machine is not None
        assert port in machine.in_use
        assert machine.ephemeral[0] <= port <= machine.ephemeral[1]
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    assert processes.listening_ports(process.pid) is None
