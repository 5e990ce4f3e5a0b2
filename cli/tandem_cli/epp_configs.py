"""Checks the EndpointPickerConfigs of pools before an EPP gets them.

The API server and the pools' schema let any object pass as `spec.routing.epp.config`. An EPP that
runs logs a configuration that it cannot use and keeps its last one; a new EPP does not start.
"""

from collections.abc import Iterable
from typing import Final

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import Document
from tandem_epp.llmd.plugins.config import load_scheduling

_PATH: Final = "spec.routing.epp.config"
_RENDERED: Final = ("backends", "disaggregated_serving")
"""Sections of the EPP's file that follow from the pools, whatever the configuration says."""


def check_epp_configs(documents: Iterable[Document]) -> None:
    """Raises DocumentError, with the line in the pool's file, for the first configuration that the
    EPP would refuse. `documents` are valid pools."""
    for document in documents:
        config = document.part(_PATH)
        if config.data is not None:
            fields = {key: value for key, value in config.data.items() if key not in _RENDERED}
            load_scheduling(config, fields, DisaggregatedServing())
