"""kopf: watches what `watched` names; each handler puts an object where it belongs and says which
keys have something to look at. No kopf state in objects, no finalizers, no policy.

kopf calls the index handlers for every object of every first list before any event handler, so the
first event means that `known` is complete; where there is none, there is nothing to do either.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import kopf
from kubernetes.aio.client.configuration import Configuration

from .known import Known, WorkKey
from .watched import Watched


class Feed(Protocol):
    """What the handlers tell."""

    def changed(self, keys: set[WorkKey]) -> None:
        """These have something to look at."""

    def complete(self) -> None:
        """With every event: all that the first lists had is known."""

    def relisted(self) -> None:
        """A list was made anew: what was deleted before it, nobody says."""


def registry(
    kinds: Sequence[Watched], known: Known, feed: Feed, configuration: Configuration
) -> kopf.OperatorRegistry:
    """Handlers for all of `kinds`, which fill `known` and tell `feed`."""
    made = kopf.OperatorRegistry()
    _login(made, configuration)
    for kind in kinds:
        _register(made, kind, known, feed)
    return made


def settings(kinds: Sequence[Watched]) -> kopf.OperatorSettings:
    """kopf as a source of events and nothing else; it needs no right to look for CRDs."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.watching.chunk_size = 500
    made.queueing.idle_timeout = 1.0
    for kind in kinds:
        if kind.selector:
            made.watching.label_selectors[_selector(kind)] = kind.selector
    return made


def quieten() -> None:
    """Keep kopf's own account of every object out of the log; its warnings and errors stay."""
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _register(made: kopf.OperatorRegistry, kind: Watched, known: Known, feed: Feed) -> None:
    where, name = _selector(kind), kind.resource.plural

    async def seen(body: kopf.Body, **_: Any) -> None:
        feed.changed(kind.see(known, dict(body)))

    async def event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        feed.complete()
        if type == "DELETED":
            feed.changed(known.leave(body))
        elif type is None and "known" in memo:
            feed.relisted()
        memo["known"] = True

    kopf.index(*where, id=f"{name}_seen", registry=made)(seen)
    kopf.on.event(*where, id=f"{name}_changed", registry=made)(event)


def _selector(kind: Watched) -> tuple[str, str, str]:
    resource = kind.resource
    return resource.group, resource.version, resource.plural


def _login(made: kopf.OperatorRegistry, configuration: Configuration) -> None:
    """kopf with the credentials of our own calls, asked again whenever they are refused."""

    async def login(**_: Any) -> kopf.ConnectionInfo:
        found: Mapping[str, Any] = await configuration.auth_settings()
        said: str = found.get("BearerToken", {}).get("value") or ""
        scheme, token = (*said.split(" ", 1), "", "")[:2]
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token.strip() or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            proxy_url=configuration.proxy,
        )

    kopf.on.login(id="login", registry=made)(login)
