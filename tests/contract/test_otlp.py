import subprocess
import sys

import pytest

from tandem_contract.otlp import Protocol, is_wanted, protocol, traces_url


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        ("", {}, False),
        ("http://c:4318", {}, True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}, True),
        ("", {"OTEL_TRACES_EXPORTER": "otlp"}, False),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"},
            False,
        ),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_spans_are_exported_when_a_collector_is_configured(
    flag: str, environ: dict[str, str], expected: bool
) -> None:
    assert is_wanted(flag, environ) is expected


@pytest.mark.parametrize(
    ("flag", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:4318/mine/v1/traces", "http://c:4318/mine/v1/traces"),
    ],
)
def test_a_collector_takes_spans_at_its_usual_path(flag: str, url: str) -> None:
    assert traces_url(flag) == url


@pytest.mark.parametrize("flag", ["collector:4318", "grpc://c:4317", "http://", "http://c:99999"])
def test_an_invalid_collector_url_is_an_error(flag: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:4318"):
        traces_url(flag)


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        ("http://c:4317", {}, Protocol.GRPC),
        ("http://c:4318", {}, Protocol.HTTP),
        ("http://c", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, Protocol.HTTP),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, Protocol.GRPC),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, Protocol.GRPC),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[x:4317"}, Protocol.HTTP),
        ("http://c:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, Protocol.HTTP),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, Protocol.GRPC),
        (
            "",
            {
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            Protocol.GRPC,
        ),
    ],
)
def test_the_environment_or_the_port_names_the_protocol(
    flag: str, environ: dict[str, str], expected: Protocol
) -> None:
    assert protocol(flag, environ) is expected


def test_nothing_of_opentelemetry_is_loaded_with_the_sidecar() -> None:
    code = "import sys, tandem_sidecar.main; print(*[m for m in sys.modules if 'telemetry' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
