"""LMCache in a pool: what would read wrong KV, and what would share none.

    lmcache_problems(spec, own_sidecar=…)    -> each such setting, with the fix

LMCache keeps KV under the name of the model and a hash of the tokens. Settings come from
`transfer.extraConfig` (`lmcache.NAME`) and from `engine.env` (`LMCACHE_NAME`). A file or a Secret
that those name is not read here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tandem_contract.connectors import ConnectorName

from .schema import Path_, Problem
from .spec import DecodeSpec, PoolSpec, PrefillSpec
from .spec_parts import ChainedConnector

LMCACHE: Final = frozenset({ConnectorName.LMCACHE, ConnectorName.LMCACHE_MP})

_CONFIG_PREFIX: Final = "lmcache."
_VARIABLE_PREFIX: Final = "LMCACHE_"
_SHARED: Final = frozenset(
    {"remote_url", "enable_p2p", "storage_plugins", "config_file", "remote_config_url"}
)
"""Settings of LMCacheConnectorV1 that name a store of several engines, or where it is named."""
_NOT_IN_KEYS: Final = {"--enable-lora": "adapters", "--enable-prompt-embeds": "embeddings"}
"""Flags of vLLM → what requests may then have that LMCache's keys do not contain. To LMCache a
prompt of embeddings is a row of zeros."""
_OFF: Final = frozenset({"", "0", "false", "no"})


def lmcache_problems(spec: PrefillSpec | DecodeSpec, *, own_sidecar: bool) -> Iterator[Problem]:
    """`own_sidecar`: the pool's sidecar is the user's, which may speak what Tandem's does not."""
    transfer = spec.transfer
    links = [link for link in transfer.links if link.connector in LMCACHE]
    if not links:
        return
    yield from _key_problems(spec)
    if isinstance(spec, PrefillSpec):
        return
    handoff = transfer.handoff_connector
    if handoff not in LMCACHE or own_sidecar:
        return
    if spec.prefill_ref is None:
        yield Problem(
            ("spec", "transfer", "connector"),
            f"{handoff} moves KV between pools, and this one has no prefillRef: use nixl, which is"
            " ignored here, or offloading to keep KV in host memory",
        )
    elif handoff == ConnectorName.LMCACHE:
        link = next(link for link in links if link.connector == handoff)
        yield from _store_problems(spec, link)


def _key_problems(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """What the KV of a prompt depends on and LMCache's keys do not."""
    fix = "use connector nixl, without lmcache in its chain"
    # DecodePools inherit the adapters and must agree on them.
    if isinstance(spec, PrefillSpec) and spec.model.lora_adapters:
        yield Problem(
            ("spec", "model", "loraAdapters"),
            "LMCache's keys do not name the adapter, so a request would read the KV of another"
            f" one: {fix}",
        )
    for argument in spec.engine.extra_args:
        flag = argument.partition("=")[0].replace("_", "-")
        if (keyed := _NOT_IN_KEYS.get(flag)) is not None:
            yield Problem(
                ("spec", "engine", "extraArgs"),
                f"{flag}: LMCache's keys do not contain {keyed}, so a request would read the KV of"
                f" another one: leave it out, or {fix}",
            )


def _store_problems(spec: PoolSpec, link: ChainedConnector) -> Iterator[Problem]:
    """Settings of LMCacheConnectorV1 with which a hand-off moves no KV, or wrong KV."""
    path = _extra_config_path(spec, link)
    settings = _settings(spec, link)
    if _is_on(settings, "enable_pd"):
        yield Problem(
            path,
            "LMCache's P/D mode (enable_pd) is not supported: its sender tells only one address"
            " when the KV has arrived, and before that a decode engine reads blocks that were not"
            ' written. Leave it out and name a shared store in "lmcache.remote_url"',
        )
    elif not spec.engine.env_from and not any(_is_on(settings, name) for name in _SHARED):
        yield Problem(
            path,
            "connector lmcache needs a store that both pools use: set"
            ' {"lmcache.remote_url": "redis://HOST:6379"}, or LMCACHE_REMOTE_URL in engine.env',
        )


def _is_on(settings: Mapping[str, Any], name: str) -> bool:
    return str(settings.get(name) or "").lower() not in _OFF


def _settings(spec: PoolSpec, link: ChainedConnector) -> dict[str, Any]:
    """LMCache's settings by name; those of the connector win, as in LMCache."""
    # A value from a Secret or a ConfigMap is not known, but there is one.
    variables = {
        str(variable.get("name")).removeprefix(_VARIABLE_PREFIX).lower(): variable.get("value", "?")
        for variable in spec.engine.env
        if str(variable.get("name")).startswith(_VARIABLE_PREFIX)
    }
    config = {
        name.removeprefix(_CONFIG_PREFIX): value
        for name, value in link.extra_config.items()
        if name.startswith(_CONFIG_PREFIX)
    }
    return {**variables, **config}


def _extra_config_path(spec: PoolSpec, link: ChainedConnector) -> Path_:
    chain = spec.transfer.connectors
    place = ("connectors", chain.index(link)) if chain else ()
    return ("spec", "transfer", *place, "extraConfig")
