"""A configuration that the EPP would refuse is refused where it was written."""

import pytest

from tandem_cli.up import check_epp_configs
from tandem_contract.documents import DocumentError, parse_documents

POOLS = """\
kind: PrefillPool
spec: {replicas: 1}
---
kind: DecodePool
spec:
  routing:
    epp:
      config:
        disaggregated_serving: {enabled: maybe}
        plugins:
        - type: prefix-cache-scorer
        - type: %s
"""


def check(scorer: str) -> None:
    check_epp_configs(parse_documents(POOLS % scorer, "pools.yaml"))


def test_an_unknown_plugin_is_named_with_its_line_and_the_nearest_known_one() -> None:
    with pytest.raises(DocumentError) as error:
        check("queue-score")
    text = "pools.yaml:12: plugins[1].type: unknown plugin 'queue-score'; did you mean"
    assert str(error.value).startswith(f"{text} 'queue-scorer'")


def test_a_good_configuration_and_sections_that_the_pools_replace_pass() -> None:
    check("queue-scorer")
