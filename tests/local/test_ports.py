"""Ports for processes that are about to start."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tandem_local.errors import SetupError
from tandem_local.ports import PortBlock

HOST = "127.0.0.1"
OTHER_PROGRAM = """
import sys
from pathlib import Path
from tandem_local.ports import PortBlock
block = PortBlock(Path(sys.argv[1]))
print(*(block.take("127.0.0.1") for _ in range(200)))
"""


@pytest.fixture
def block(tmp_path: Path) -> Iterator[PortBlock]:
    with closing(PortBlock(tmp_path)) as block:
        yield block


def test_two_programs_take_different_ports(tmp_path: Path, block: PortBlock) -> None:
    command = [sys.executable, "-c", OTHER_PROGRAM, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {block.take(HOST) for _ in range(200)} & {int(port) for port in other}


def test_a_port_recurs_only_after_all_others(block: PortBlock) -> None:
    ports = [block.take(HOST) for _ in range(100)]
    assert len(set(ports)) == 100
    assert all(25_000 <= port < 30_000 for port in ports)


def test_a_port_that_something_listens_on_is_left_out(block: PortBlock) -> None:
    with socket.create_server((HOST, block.take(HOST))) as server:
        used = server.getsockname()[1]
        assert used not in {block.take(HOST) for _ in range(400)}


def test_no_free_port_names_the_range(block: PortBlock) -> None:
    with pytest.raises(SetupError, match=r"no free port on 203\.0\.113\.1 between \d+ and \d+"):
        block.take("203.0.113.1")


def test_every_block_locked_names_the_folder(tmp_path: Path) -> None:
    with ExitStack() as held:
        for _ in range(24):
            held.enter_context(closing(PortBlock(tmp_path)))
        with pytest.raises(SetupError, match=f"24 programs have locked all ports in {tmp_path}"):
            PortBlock(tmp_path)
    PortBlock(tmp_path).close()
