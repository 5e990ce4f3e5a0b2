"""The program beside Envoy that gives it the API keys of clients, and every change of them.

    python3 -m tandem_operator.routing.api_keys SECRET_DIRECTORY FILE

SECRET_DIRECTORY is a mounted Secret: each file is named after a client and holds its key. FILE is
the configuration of Envoy's filter api_key_auth, which Envoy reads again whenever the file is
replaced. Envoy compares the keys; this program only writes them. It checks the directory every
second, because the kubelet replaces it without telling anybody, and ends on SIGTERM.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from tandem_contract.programs import end_at_sigterm

if __name__ == "__main__":
    # Before the next imports, which take a moment.
    end_at_sigterm(0)

from tandem_contract.api_keys import clients_by_key, read_keys
from tandem_contract.headers import CLIENT

from .envoy.clusters import TYPE, Json
from .envoy.http_filters import API_KEY_AUTH, full_filter_name

_PERIOD: Final = 1.0
_KEY_SOURCES: Final = ({"header": "Authorization"}, {"header": "x-api-key"})
"""Where clients send keys. Of Authorization, Envoy reads what follows `Bearer `."""
_log: Final = logging.getLogger(__name__)


def filter_config(key_by_client: dict[str, str]) -> Json:
    """The file's content: a discovery response with the filter's configuration.

    Of clients with equal keys the first by name counts, because Envoy refuses the same key twice.
    Without any key all requests are refused.
    """
    client_by_key = clients_by_key(key_by_client)
    config = {
        "@type": TYPE + "extensions.filters.http.api_key_auth.v3.ApiKeyAuth",
        "credentials": [{"key": key, "client": name} for key, name in client_by_key.items()],
        "key_sources": list(_KEY_SOURCES),
        # The engines and their logs need no keys of clients; the EPP may keep clients apart.
        "forwarding": {"header": CLIENT, "hide_credentials": True},
    }
    resource = {
        "@type": TYPE + "config.core.v3.TypedExtensionConfig",
        "name": full_filter_name(API_KEY_AUTH),
        "typed_config": config,
    }
    version = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]
    return {"version_info": version, "resources": [resource]}


def update(directory: Path, file: Path, current: Json | None) -> Json:
    """Write `file` if the keys in `directory` differ from `current`; returns what it holds now."""
    config = filter_config(read_keys(directory))
    if config != current:
        part = file.with_suffix(".new")
        part.touch(mode=0o600)
        part.write_text(json.dumps(config))
        # Envoy reads the file when another is moved into its place, and so never half of one.
        os.replace(part, file)
        credentials = config["resources"][0]["typed_config"]["credentials"]
        _log.info("%d clients have an API key", len(credentials))
    return config


def follow(directory: Path, file: Path, stopping: threading.Event) -> None:
    """Keep `file` up to date until `stopping`. Keys that cannot be read are reported once, and the
    previous ones stay in use; without previous ones Envoy refuses all clients."""
    config: Json | None = None
    reported = ""
    while True:
        try:
            config = update(directory, file, config)
            reported = ""
        except OSError as err:
            if str(err) != reported:
                reported = str(err)
                _log.error("API keys not read, the previous keys stay in use: %s", err)
        if stopping.wait(_PERIOD):
            return


def main(directory: str, file: str) -> None:
    """Keep the file up to date until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    follow(Path(directory), Path(file), stopping)


if __name__ == "__main__":
    main(*sys.argv[1:])
