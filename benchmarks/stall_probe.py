"""How long others wait for an EPP: sends a response chunk each millisecond and awaits its answer.

For each line on stdin it prints the longest wait since the last one, in seconds.

python -m benchmarks.stall_probe PORT
"""

import select
import sys
from time import perf_counter

import click

from .blocking_client import Client, chunk_message, head_message


@click.command()
@click.argument("port", type=int)
def main(port: int) -> None:
    """Measure until stdin ends."""
    client, message = Client(port), chunk_message(b"x" * 250)
    stream = client.open(head_message("/v1/responses/x/cancel", end=True))
    client.answer(stream)
    longest = 0.0
    while True:
        if select.select([sys.stdin], [], [], 0.001)[0]:
            if not sys.stdin.readline():
                break
            print(longest, flush=True)
            longest = 0.0
        before = perf_counter()
        client.send(stream, message)
        client.answer(stream)
        longest = max(longest, perf_counter() - before)


if __name__ == "__main__":
    main()
