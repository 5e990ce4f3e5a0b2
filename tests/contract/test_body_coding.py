"""Which values of Content-Encoding name a coding."""

import pytest

from tandem_contract.body_coding import is_coded


@pytest.mark.parametrize("value", ["", "identity", "Identity", "identity, identity", ",", " \t"])
def test_a_body_as_it_is_has_no_coding(value: str) -> None:
    assert not is_coded(value)


@pytest.mark.parametrize(
    "value", ["gzip", "GZip", "deflate", "br", "zstd", "x", "identity,gzip", "gzip, identity", "*"]
)
def test_any_other_value_is_a_coding(value: str) -> None:
    assert is_coded(value)
