"""The three kinds of stores as real servers: a directory, `tandem store`, and versitygw (S3)."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tandem_kvstore.location import Secret, StoreCredentials, StoreLocation, store_location
from tandem_kvstore.server.app import StoreSettings
from tandem_kvstore.server.listener import StoreListener
from tandem_local.ports import free_port

from ..cluster import tools
from ..cluster.fixtures import LEFT_OUT
from ..epp.real import process, until

ACCESS_KEY = "TESTACCESSKEY"
SECRET_KEY = "a-secret-that-must-appear-nowhere"
BUCKET = "tandem-test"
NAMESPACE = f"{BUCKET}/kv-cache"


@dataclass(frozen=True)
class Server:
    """A running store. `directory` holds its objects as files."""

    location: StoreLocation
    directory: Path
    process: asyncio.subprocess.Process | None = None


def s3_location(endpoint: str, secret: str = SECRET_KEY, **options: float) -> StoreLocation:
    """A namespace in the bucket of `versitygw`."""
    credentials = StoreCredentials(Secret(ACCESS_KEY), Secret(secret))
    return store_location(endpoint, NAMESPACE, credentials=credentials, **options)  # type: ignore[arg-type]


def file_store(directory: Path) -> Server:
    """`file://`."""
    location = store_location(f"file://{directory}", NAMESPACE)
    return Server(location, directory / NAMESPACE)


@asynccontextmanager
async def store_in_this_process(
    directory: Path, host: str = "127.0.0.1", **limits: float
) -> AsyncIterator[Server]:
    """The server of `tandem store`, without the second that a process takes to start."""
    # As the command runs it: aiohttp's TestServer cancels the handler of a client that leaves,
    # which loses the file that a thread is opening for it.
    listener = StoreListener(StoreSettings(directory, **limits))  # type: ignore[arg-type]
    try:
        _, port = await listener.start(host, 0)
        yield Server(store_location(f"http://{host}:{port}", NAMESPACE), directory / NAMESPACE)
    finally:
        await listener.close()


@asynccontextmanager
async def tandem_store(
    directory: Path, *flags: str, port: int = 0, preload: str = "", within: Sequence[str] = ()
) -> AsyncIterator[Server]:
    """Run `tandem store`. `preload`: a library; `within`: words before the command."""
    port = port or free_port("127.0.0.1")
    command = (
        *(*within, sys.executable, "-m", "tandem_cli", "store"),
        *("--listen", f"127.0.0.1:{port}", "--dir", str(directory), *flags),
    )
    async with process(*command, **({"LD_PRELOAD": preload} if preload else {})) as server:
        await _answers(server, f"http://127.0.0.1:{port}/healthz")
        yield Server(
            store_location(f"http://127.0.0.1:{port}", NAMESPACE), directory / NAMESPACE, server
        )


@asynccontextmanager
async def versitygw(
    directory: Path,
    port: int = 0,
    *,
    options: Sequence[str] = (),
    posix: Sequence[str] = (),
    secret: str = SECRET_KEY,
    within: Sequence[str] = (),
) -> AsyncIterator[Server]:
    """Run versitygw over a directory. Raises MissingTool if it is not built.

    `options` and `posix`: more flags, of the program and of its command for directories. `secret`:
    the key that it accepts. `within`: words before the command, for instance of `unshare`.
    """
    (directory / BUCKET).mkdir(parents=True, exist_ok=True)
    port = port or free_port("127.0.0.1")
    keys = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": secret}
    command = (
        *(*within, tools.path("versitygw"), "--port", f"127.0.0.1:{port}"),
        *("--health", "/healthz", "--quiet", *options, "posix", *posix, str(directory)),
    )
    async with process(*map(str, command), **keys) as server:
        await _answers(server, f"http://127.0.0.1:{port}/healthz")
        location = s3_location(f"http://127.0.0.1:{port}")
        yield Server(location, directory / NAMESPACE, server)


def small_disk(directory: Path) -> Sequence[str]:
    """Words before a command, which then has a disk of 400 KiB at `directory`, with the bucket.

    Skips the test where no disk can be mounted.
    """
    directory.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size=400k tmpfs "$0" && mkdir "$0/{BUCKET}" && exec "$@"'
    own = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(directory))
    try:
        subprocess.run([*own, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as err:
        pytest.skip(f"{LEFT_OUT}no small disk can be mounted in a namespace here: {err}")
    return own


async def _answers(server: asyncio.subprocess.Process, url: str) -> None:
    async with aiohttp.ClientSession() as http:

        async def is_up() -> bool:
            assert server.returncode is None, "the store exited at start"
            try:
                async with http.get(url) as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(is_up)
