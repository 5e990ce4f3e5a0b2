"""A peer for test_death, run as a process of its own: stops in mid-hand-off until it is killed.

python -m tests.engine.transfer.dying_peer reader HOST PORT    reads one segment
python -m tests.engine.transfer.dying_peer producer            sends half of one; prints a port
"""

import signal
import socket
import sys

from tandem_engine.transfer import wire
from tandem_engine.types import KvLayout

LAYOUT = KvLayout("tiny", "float32", layers=3, kv_heads=2, head_dim=8, block_size=4)
ENGINE = "engine-1"
HASH = "prompt"


def reader(host: str, port: str) -> None:
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(
            wire.pack(wire.Hello(wire.VERSION, ENGINE, LAYOUT), wire.Read("r", 0, 8, 10, HASH))
        )
        assert isinstance(wire.receive_frame(sock, wire.to_reader), wire.Welcome)
        assert wire.receive_frame(sock, wire.to_reader) == wire.Segment(0, 0, 2)
        print("reading", flush=True)
        signal.pause()


def producer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        sock, _ = listening.accept()
        with sock:
            assert isinstance(wire.receive_frame(sock, wire.to_producer), wire.Hello)
            assert isinstance(wire.receive_frame(sock, wire.to_producer), wire.Read)
            sock.sendall(wire.pack(wire.Welcome(30.0), wire.Segment(0, 0, 2)))
            sock.sendall(bytes(LAYOUT.block_bytes))
            print("reading", flush=True)
            signal.pause()


if __name__ == "__main__":
    {"reader": reader, "producer": producer}[sys.argv[1]](*sys.argv[2:])
