"""Sessions stay on their pod, by a token that the client keeps or by an id of its own."""

from base64 import b64encode

import pytest

from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins import sessions
from tandem_epp.llmd.plugins.sessions import (
    IdSession,
    IdSource,
    SessionFilter,
    SessionScorer,
    TokenSession,
)

from .pods import make_pod

PODS = [make_pod("a"), make_pod("b")]


def with_headers(now: float = 0.0, **headers: str) -> ChoiceContext:
    return ChoiceContext(
        None, headers={n.replace("_", "-"): v for n, v in headers.items()}, now=now
    )


def test_a_token_names_the_pod_that_served() -> None:
    session = TokenSession("x-session-token")
    header = session.response_header(PODS[1], None, None)
    assert header == ("x-session-token", b64encode(b"b").decode())
    context = with_headers(x_session_token=header[1])
    assert SessionScorer(session).score(PODS, context) == [0, 1]
    assert SessionFilter(session).keep(PODS, context) == [PODS[1]]


@pytest.mark.parametrize("token", ["", "???", "////", "YQ", b64encode(b"gone").decode()])
def test_a_token_of_no_candidate_prefers_none(token: str) -> None:
    session, context = TokenSession("x-session-token"), with_headers(x_session_token=token)
    assert SessionScorer(session).score(PODS, context) == [0, 0]
    assert SessionFilter(session).keep(PODS, context) is PODS


def test_a_token_may_name_the_prefill_pod() -> None:
    session = TokenSession("x-prefill", is_prefill=True)
    assert session.response_header(PODS[0], None, None) is None
    assert session.response_header(PODS[0], PODS[1], None) == (
        "x-prefill",
        b64encode(b"b").decode(),
    )


def request(session: IdSession, pods: list[Pod], placed: Pod, now: float = 0.0) -> list[float]:
    """The scores of a request of session `s`, which then goes to `placed`."""
    context = with_headers(now, x_session_id="s")
    scores = SessionScorer(session).score(pods, context)
    session.on_placed(context, placed, None)
    return scores


def test_an_id_stays_on_its_first_pod_until_that_is_no_candidate() -> None:
    session = IdSession([IdSource("x-session-id")], ttl=300.0)
    assert request(session, PODS, PODS[0]) == [0, 0]
    # Other scorers may outweigh the session: it stays bound.
    assert request(session, PODS, PODS[1]) == [1, 0]
    assert request(session, PODS, PODS[0]) == [1, 0]
    assert request(session, PODS[1:], PODS[1]) == [0]
    assert request(session, PODS, PODS[1]) == [0, 1]


def test_an_idle_session_is_forgotten() -> None:
    session = IdSession([IdSource("x-session-id")], ttl=300.0)
    request(session, PODS, PODS[0], now=0.0)
    assert request(session, PODS, PODS[0], now=299.0) == [1, 0]
    assert request(session, PODS, PODS[1], now=600.0) == [0, 0]
    assert request(session, PODS, PODS[1], now=601.0) == [0, 1]


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    session = IdSession([IdSource("x-session-id")], ttl=300.0)
    for name in ("one", "two", "one", "three"):
        session.on_placed(with_headers(x_session_id=name), PODS[0], None)
    bound = {
        name: session.pod(PODS, with_headers(x_session_id=name)) for name in ("one", "two", "three")
    }
    assert bound == {"one": PODS[0], "two": None, "three": PODS[0]}
    long = "x" * 10_000
    session.on_placed(with_headers(x_session_id=long), PODS[1], None)
    assert session.pod(PODS, with_headers(x_session_id=long)) is PODS[1]


def test_the_first_source_with_an_id_counts() -> None:
    session = IdSession([IdSource("x-a"), IdSource(cookie="sid"), IdSource("x-b")], ttl=300.0)
    session.on_placed(with_headers(cookie="lang=de; sid=1", x_b="2"), PODS[1], None)
    for context, pod in (
        (with_headers(cookie="sid=1"), PODS[1]),
        (with_headers(x_a=" 1 "), PODS[1]),
        (with_headers(x_b="2"), None),
        (with_headers(cookie="x=1"), None),
    ):
        assert session.pod(PODS, context) is pod


def test_a_prefill_session_remembers_the_prefill_pod() -> None:
    session = IdSession([IdSource("x-session-id")], ttl=300.0, is_prefill=True)
    context = with_headers(x_session_id="s")
    session.on_placed(context, PODS[0], None)
    assert session.pod(PODS, context) is None
    session.on_placed(context, PODS[0], PODS[1])
    assert session.pod(PODS, context) is PODS[1]
