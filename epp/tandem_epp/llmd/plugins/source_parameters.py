"""Parameters of metrics-data-source."""

from typing import Annotated, Literal

from msgspec import Meta

from ...backends.scrape_settings import ScrapeSettings, client_tls
from .parameters import Strict


class MetricsSourceParameters(Strict, frozen=True):
    """Parameters of metrics-data-source."""

    scheme: Annotated[
        Literal["http", "https"],
        Meta(
            description="of pods that are found in a cluster, for warm-ups as well; a backend of "
            "`backends` has it in its URL"
        ),
    ] = "http"
    path: Annotated[str, Meta(pattern="^/", description="of the page")] = ScrapeSettings.path
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="of the page, where it is not the port of requests"),
    ] = None
    insecureSkipVerify: Annotated[  # noqa: N815 - llm-d's name
        bool, Meta(description="with https, any certificate is accepted")
    ] = True
    caCertPath: Annotated[  # noqa: N815
        str,
        Meta(
            description="PEM file of the authorities whose certificates are accepted if "
            "`insecureSkipVerify` is false; else the system's. Read again when the configuration "
            "is reloaded"
        ),
    ] = ""
    clientCertPath: Annotated[  # noqa: N815
        str, Meta(description="PEM file of the EPP's own certificate")
    ] = ""
    clientKeyPath: Annotated[str, Meta(description="and of its key")] = ""  # noqa: N815
    interval: Annotated[
        str, Meta(description="ignored: engines are scraped fast under load and slowly at rest")
    ] = ""


def scrape_settings(parameters: MetricsSourceParameters) -> ScrapeSettings:
    """The settings that the parameters stand for. Raises ValueError."""
    tls = client_tls(
        verifies=not parameters.insecureSkipVerify,
        authorities=parameters.caCertPath,
        certificate=parameters.clientCertPath,
        key=parameters.clientKeyPath,
    )
    return ScrapeSettings(parameters.scheme, parameters.path, parameters.port, tls)
