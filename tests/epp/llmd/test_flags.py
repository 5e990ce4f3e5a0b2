"""The table of llm-d's flags is complete, and each flag is treated as it says."""

import re

import pytest
from click.testing import CliRunner

from tandem_contract.llmd_flags import Treatment
from tandem_epp.llmd.flags import BY_NAME, FLAGS
from tandem_epp.main import main

OPTIONS_OF_0_10 = """
grpc-port ha-enable-leader-election drain-timeout grpc-max-recv-msg-size grpc-max-send-msg-size
pool-group pool-namespace pool-name endpoint-selector endpoint-target-ports
disable-endpoint-subset-filter emit-endpoint-scores refresh-metrics-interval
refresh-prometheus-metrics-interval metrics-staleness-threshold total-queued-requests-metric
total-running-requests-metric kv-cache-usage-percentage-metric lora-info-metric cache-info-metric
v zap-devel zap-encoder zap-log-level zap-stacktrace-level zap-time-encoding tracing health-checking
metrics-port grpc-health-port enable-pprof cert-path enable-cert-reload enable-grpc-stream-metrics
secure-serving tls-min-version tls-cipher-suites metrics-endpoint-auth metrics-client-ca-file
metrics-cert-dir config-file config-text allow-experimental-plugins
"""
"""Every flag that the EPP of llm-d-router v0.10.0 defines."""
OPTIONS_AFTER_0_10 = "feature-gates plugin-state-staleness-threshold fairness-id-metric-label-limit"
"""Those that its main branch has added since."""
OPTIONS = f"{OPTIONS_OF_0_10} {OPTIONS_AFTER_0_10}".split()


def test_the_table_has_every_flag_of_llmds_epp() -> None:
    assert sorted(BY_NAME) == sorted(OPTIONS)
    assert len(FLAGS) == len(BY_NAME)


def names(*treatments: Treatment) -> list[str]:
    return [flag.name for flag in FLAGS if flag.treatment in treatments]


@pytest.mark.parametrize("name", names(Treatment.REFUSED))
def test_a_refused_flag_ends_with_its_reason(name: str) -> None:
    result = CliRunner().invoke(main, ["--pool-name=p", f"--{name}=x"])
    assert result.exit_code == 2
    assert f"'--{name}': refused: {BY_NAME[name].text.replace('`', '')}" in result.stderr


def test_own_flags_of_the_same_setting_exclude_llmds() -> None:
    for flag in FLAGS:
        if flag.own is None:
            continue
        own = next(p for p in main.params if p.name == flag.own)
        assert own.opts[0] == f"--{flag.own.replace('_', '-')}"
    result = CliRunner().invoke(main, ["--pool-name=p", "--grpc-port=1", "--listen=x:2"])
    assert result.exit_code == 2
    assert "--grpc-port and --listen exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--pool-name=p", "--discovery=kubernetes", "--namespace=n", "--endpoint=e"], "exclude"),
        (["--pool-name=p", "--pool-namespace=n", "--namespace=n"], "exclude each other"),
        (["--tracing", "false", "--config=x"], r"unexpected extra argument \(false\)"),
        (["--pool-name=p", "--ext-proc-server=grpcio"], "TLS needs --ext-proc-server http2"),
        (["--tracing=false"], "Missing option '--config'"),
        (["--pool-name=p", "--feature-gates=flowcontol"], "did you mean 'flowControl'"),
        (["--pool-name=p", "--feature-gates=flowControl=maybe"], "write flowControl=true or"),
        (["--grpc-port=x"], "'--grpc-port': 'x' is not an integer"),
    ],
)
def test_usage_errors(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert re.search(reason, result.stderr)
