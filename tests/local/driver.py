"""Runs one pod with a grandchild process until killed; prints its process group."""

import asyncio
import sys
from pathlib import Path

from tandem_local.runner import Runner

from .pods import container, pod


async def main() -> None:
    runner = Runner(Path(sys.argv[1]))
    pods = runner.add([pod("a", container(args=("--stubborn", "--grandchild")))])
    runner.start(pods)
    await runner.wait_ready(pods)
    print(pods[0].pids["web"], flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
