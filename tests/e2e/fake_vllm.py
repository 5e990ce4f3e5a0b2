"""Program of the engine containers in place of vLLM, which no image here has; run as `python3 -c`.

It is started with vLLM's own arguments, as the operator renders them. As vLLM does, it looks up the
model in the cache of the Hugging Face hub by `--revision`, and listens on ports that UCX may take.
Then it serves that model with the reference engine.
"""

import os
import socket
import sys

from huggingface_hub import snapshot_download

UNKNOWN = {
    "--revision": 1,
    "--gpu-memory-utilization": 1,
    "--enable-prompt-tokens-details": 0,
    "--shutdown-timeout": 1,
}
"""Flags that the reference engine does not have or writes otherwise, and how many values follow."""


def listen() -> None:
    """Listen on the first and last port of UCX_TCP_PORT_RANGE and on the next one, outside of it.

    The kernel takes connections as long as the process lives.
    """
    first, last = map(int, os.environ["UCX_TCP_PORT_RANGE"].split("-"))
    for port in (first, last, last + 1):
        listener = socket.create_server((os.environ["POD_IP"], port))
        listener.set_inheritable(True)
        listener.detach()


def engine_arguments(arguments: list[str]) -> list[str]:
    """The reference engine's arguments for those of `vllm serve`."""
    repository, *flags = arguments
    directory = snapshot_download(repository, revision=flags[flags.index("--revision") + 1])
    print(f"loading {directory}", flush=True)
    for flag, values in UNKNOWN.items():
        if flag in flags:
            start = flags.index(flag)
            del flags[start : start + 1 + values]
    return ["--model", directory, *flags]


if __name__ == "__main__":
    listen()
    os.execvp("tandem-engine", ["tandem-engine", *engine_arguments(sys.argv[1:])])
