"""Go's names of versions and ciphers of TLS."""

import ssl

import pytest

from tandem_contract.go_tls import AEAD, WITH_CBC, openssl_ciphers, tls_version


def test_openssl_knows_every_cipher_by_the_name_in_the_table() -> None:
    for name in WITH_CBC.values():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers(name)
        of_1_2 = [each["name"] for each in context.get_ciphers() if each["protocol"] != "TLSv1.3"]
        assert of_1_2 == [name]


def test_names_become_openssl_s_and_those_of_tls_1_3_are_left_out() -> None:
    names = [" TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", "TLS_AES_128_GCM_SHA256", ""]
    assert openssl_ciphers(names, WITH_CBC) == "ECDHE-RSA-AES128-SHA"
    assert openssl_ciphers(names[1:], AEAD) == ""
    with pytest.raises(ValueError, match="TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA is not allowed"):
        openssl_ciphers(names, AEAD)


def test_versions() -> None:
    assert tls_version("VersionTLS10") < tls_version("VersionTLS13") == ssl.TLSVersion.TLSv1_3
    with pytest.raises(ValueError, match="'TLS13' is none of VersionTLS10, "):
        tls_version("TLS13")
