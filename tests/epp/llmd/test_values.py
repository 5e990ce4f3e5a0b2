"""What llm-d's flags, in its syntax, make of the settings."""

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tandem_contract.commandline import HostPort
from tandem_epp.backends.inference_pool import PoolReference
from tandem_epp.backends.pod_backend import PodSelection
from tandem_epp.llmd.options import EppCommand, given, llmd_options
from tandem_epp.llmd.values import with_values
from tandem_epp.server.http2.tls import TlsSettings
from tandem_epp.settings import Settings

PLAIN = Settings(config=None)
POOL = ("--pool-name", "p")
AS_LLMD = replace(
    PLAIN,
    pods=PoolReference("default", "p"),
    tls=TlsSettings(),
    authorize_metrics=True,
    drain_timeout=30.0,
)
"""With `--pool-name p` alone."""


def settings(*arguments: str, **environ: str) -> Settings:
    """The settings that a command line stands for. Raises ValueError."""
    values: dict[str, Any] = {}

    @click.command(cls=EppCommand)
    @llmd_options
    @click.pass_context
    def command(context: click.Context) -> None:
        values.update(given(context))

    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.stderr
    return with_values(PLAIN, values, environ)


def test_without_llmds_flags_nothing_changes() -> None:
    assert settings() == PLAIN


def test_a_pool_brings_llmds_defaults() -> None:
    assert settings(*POOL) == AS_LLMD
    named = settings(*POOL, "--pool-namespace=n", "--pool-group=g.example", NAMESPACE="m")
    assert named.pods == PoolReference("n", "p", "g.example")
    assert settings(*POOL, NAMESPACE="m").pods == PoolReference("m", "p")


def test_the_last_entry_of_a_gate_counts() -> None:
    gates = ("--feature-gates=haPopulateNonLeaderDatastore=false,flowControl",)
    named = {"haPopulateNonLeaderDatastore": False, "flowControl": False}
    both = settings(*POOL, *gates, "--feature-gates=flowControl=false")
    assert both == replace(AS_LLMD, feature_gates=both.feature_gates)
    assert both.feature_gates == named
    once = settings(*POOL, "--feature-gates=dataLayer,flowControl=0,flowControl=1")
    assert once.feature_gates == {"dataLayer": True, "flowControl": True}


def test_a_selector_has_ports() -> None:
    flags = ("--endpoint-selector", "app=vllm,tier in (a)", "--endpoint-target-ports", "8000,8001")
    pods = PodSelection("default", "app=vllm,tier in (a)", (8000, 8001))
    assert settings(*flags) == replace(AS_LLMD, pods=pods)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--secure-serving=false", {"tls": None}),
        (
            "--cert-path=/certs --enable-cert-reload --tls-min-version=VersionTLS13",
            {"tls": TlsSettings(directory=Path("/certs"), minimum=ssl.TLSVersion.TLSv1_3)},
        ),
        ("--tls-min-version=VersionTLS10", {}),
        (
            "--tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_AES_128_GCM_SHA256",
            {"tls": TlsSettings(ciphers="ECDHE-RSA-AES128-GCM-SHA256")},
        ),
        ("--metrics-endpoint-auth=false", {"authorize_metrics": False}),
        (
            "--metrics-cert-dir=/m --metrics-client-ca-file=/ca.pem",
            {"metrics_tls": TlsSettings(directory=Path("/m"), client_ca=Path("/ca.pem"))},
        ),
        (
            "--grpc-port 1 --grpc-health-port=2 --metrics-port=3",
            {
                "listen": HostPort("0.0.0.0", 1),
                "health": HostPort("0.0.0.0", 2),
                "metrics": HostPort("0.0.0.0", 3),
            },
        ),
        ("--config-file=/config/x.yaml", {"config": Path("/config/x.yaml")}),
        ("--config-text={}", {"config_text": "{}"}),
        ("--drain-timeout=1m", {"drain_timeout": 60.0}),
        ("--drain-timeout=-1s", {"drain_timeout": 0.0}),
        ("--tracing=false", {"tracing": False}),
        ("--tracing", {"tracing": True}),
        ("-v=4", {"log_level": "debug"}),
        ("-v 2", {"log_level": "info"}),
        ("-v=5 --zap-log-level=error", {"log_level": "error"}),
        ("--zap-log-level=4", {"log_level": "debug"}),
        ("--zap-encoder json", {"log_json": True}),
        ("--grpc-max-recv-msg-size=25MB", {"max_body": 25_000_000}),
        ("--grpc-max-recv-msg-size=32MiB", {"max_body": 32 << 20}),
        ("--grpc-max-recv-msg-size=4Mi", {}),
        ("--disable-endpoint-subset-filter", {"subset_hints": False}),
        ("--ha-enable-leader-election --refresh-metrics-interval=1s --zap-devel=false", {}),
    ],
)
def test_each_flag_has_its_setting(flags: str, changed: dict[str, Any]) -> None:
    assert settings(*POOL, *flags.split()) == replace(AS_LLMD, **changed)


def test_flags_may_stand_without_a_pool() -> None:
    serving = settings("--secure-serving", "--metrics-endpoint-auth", "--drain-timeout=5s")
    tls = TlsSettings()
    assert serving == replace(PLAIN, tls=tls, authorize_metrics=True, drain_timeout=5.0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--pool-name=p --endpoint-selector=a=b", "exclude each other"),
        ("--pool-name=P", "--pool-name: 'P' is not a valid name"),
        ("--pool-name=p --pool-group=a/b", "--pool-group: 'a/b'"),
        ("--pool-name=p --pool-namespace=N", "--pool-namespace: 'N'"),
        ("--endpoint-selector=a=b", "needs --endpoint-target-ports"),
        ("--endpoint-selector=a=b --endpoint-target-ports=1,2,3,4,5,6,7,8,9", "1 to 8 ports"),
        ("--endpoint-selector=a=b --endpoint-target-ports=0", "0 is not a port"),
        ("--endpoint-selector=a=b=c --endpoint-target-ports=1", "not a label selector"),
        ("--config-file=a --config-text=b", "exclude each other"),
        ("--grpc-port=70000", "--grpc-port: 70000 is not a port"),
        ("--zap-log-level=loud", "'loud' is neither a level nor a number"),
        ("--zap-encoder=xml", "'xml' is neither json nor console"),
        ("--secure-serving --tls-min-version=1.2", "'1.2' is none of VersionTLS10"),
        (
            "--secure-serving --tls-cipher-suites=TLS_RSA_WITH_AES_128_CBC_SHA",
            "with HTTP/2: TLS_RSA_WITH_AES_128_CBC_SHA is not allowed",
        ),
        ("--metrics-client-ca-file=/ca.pem", "needs --metrics-cert-dir"),
        ("--grpc-max-recv-msg-size=much", "'much' is not a size"),
    ],
)
def test_what_cannot_be_says_why(flags: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^--") as raised:
        settings(*flags.split())
    assert reason in str(raised.value)
