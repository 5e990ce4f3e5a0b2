"""The client over TLS, with a certificate authority of its own."""

import ssl
from pathlib import Path

import pytest
import trustme

from tandem_loadtest.calls import Call, Result
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.records import Outcome

from ..servers import DONE, chunk, sse
from .raw import Peer, always, chunked, raw_server

CALL = Call("once", max_tokens=2)
USAGE = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
ANSWER = chunked(chunk("a", 1, "length"), USAGE, DONE)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls_server(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def sent(context: ssl.SSLContext, trusted: trustme.CA, directory: Path) -> list[Result]:
    ca_file = directory / "ca.pem"
    trusted.cert_pem.write_to_path(str(ca_file))
    async with (
        raw_server(always(ANSWER), context) as url,
        Client(ClientSettings(url=url, model="m", ca_file=str(ca_file))) as client,
    ):
        return [await client.send(CALL) for _ in range(2)]


async def test_a_server_with_a_certificate_of_the_given_authority(
    authority: trustme.CA, tmp_path: Path
) -> None:
    results = await sent(tls_server(authority, "127.0.0.1"), authority, tmp_path)
    assert [(result.error, result.answer.text) for result in results] == [(None, "a")] * 2


@pytest.mark.parametrize(("name", "trusted"), [("127.0.0.1", False), ("127.0.0.2", True)])
async def test_a_server_with_another_certificate_is_refused(
    authority: trustme.CA, tmp_path: Path, name: str, trusted: bool
) -> None:
    trust = authority if trusted else trustme.CA()
    result, _ = await sent(tls_server(authority, name), trust, tmp_path)
    assert result.outcome is Outcome.CONNECTION_LOST
    assert "certificate verify failed" in str(result.error)


async def test_a_request_that_the_server_read_is_not_sent_again(
    authority: trustme.CA, tmp_path: Path
) -> None:
    requests: list[int] = []

    async def serve(peer: Peer) -> None:
        for response in (ANSWER, b""):
            await peer.request()
            requests.append(peer.index)
            peer.send(response)

    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    async with (
        raw_server(serve, tls_server(authority, "127.0.0.1")) as url,
        Client(ClientSettings(url=url, model="m", ca_file=str(ca_file))) as client,
    ):
        outcomes = [(await client.send(CALL)).outcome for _ in range(2)]
    assert outcomes == [Outcome.OK, Outcome.CONNECTION_LOST]
    assert requests == [0, 0]
