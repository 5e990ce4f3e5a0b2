"""The flags of llm-d's sidecar: what each becomes, and which are refused."""

import asyncio
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from tandem_contract.commandline import HostPort
from tandem_contract.llmd_flags import Treatment
from tandem_sidecar.llmd_command import notes
from tandem_sidecar.llmd_flags import FLAGS
from tandem_sidecar.llmd_translation import PRIVATE_NETWORKS
from tandem_sidecar.main import main, settings_from
from tandem_sidecar.observability.logs import LogFormat
from tandem_sidecar.security.credentials import ListenTls
from tandem_sidecar.security.route import AllowList, parse_allow
from tandem_sidecar.settings import Settings

from .peers import FakeDecode, FakePrefill
from .processes import fails, spawn

component = pytest.mark.component

LLMD_0_10 = re.findall(
    r"\S+",
    """
port model-server-port vllm-port data-parallel-size kv-connector ec-connector
mooncake-bootstrap-port p2p-connector-port enable-p2p-pull secure-proxy cert-path
enable-ssrf-protection enable-prefiller-sampling pool-group decode-chunk-size tracing metrics-port
moriio-write-mode moriio-decode-notify-port moriio-local-pod-ip moriio-decode-handshake-port
moriio-parallel-dispatch moriio-parallel-decode-wait-timeout moriio-prefill-handshake-port
moriio-prefill-notify-port moriio-tp-size moriio-dp-size moriio-remote-hosts moriio-dp-size-local
moriio-decode-hosts enable-tls tls-insecure-skip-verify inference-pool max-idle-conns-per-host
prefill-max-retries prefill-retry-backoff configuration configuration-file
zap-devel zap-encoder zap-log-level zap-stacktrace-level zap-time-encoding
""",
)
LLMD_AFTER_0_10 = re.findall(
    r"\S+",
    "secure-serving tls-min-version tls-cipher-suites metrics-cert-dir enable-speculative-prefill",
)
LLMD_OLDER = re.findall(
    r"\S+",
    """
connector prefiller-use-tls decoder-use-tls prefiller-tls-insecure-skip-verify
decoder-tls-insecure-skip-verify inference-pool-namespace inference-pool-name v
""",
)


def settings(*arguments: str) -> Settings:
    return settings_from(main.make_context("tandem-sidecar", list(arguments)).params)


def lines(*arguments: str) -> tuple[str, ...]:
    return notes(main.make_context("tandem-sidecar", list(arguments)))


def error(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def test_every_flag_of_llm_d_is_in_the_table_once() -> None:
    assert sorted(flag.name for flag in FLAGS) == sorted(
        [*LLMD_0_10, *LLMD_AFTER_0_10, *LLMD_OLDER]
    )


def test_without_them_nothing_changes() -> None:
    assert settings() == Settings()
    assert lines() == ()


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (("--port=9000",), {"listen": HostPort("*", 9000)}),
        (("--model-server-port", "8300"), {"engine": HostPort("127.0.0.1", 8300)}),
        (("--vllm-port=8300",), {"engine": HostPort("127.0.0.1", 8300)}),
        (
            ("--vllm-port=8300", "--model-server-port=8400"),
            {"engine": HostPort("127.0.0.1", 8400)},
        ),
        (("--data-parallel-size=4",), {"ranks": 4}),
        (("--kv-connector=nixlv2",), {"connector": "nixl"}),
        (("--kv-connector=offloading", "--connector=nixlv2"), {"connector": "offloading"}),
        (
            ("--kv-connector=mooncake", "--mooncake-bootstrap-port=8000"),
            {"connector": "mooncake", "peer_port": 8000},
        ),
        (("--mooncake-bootstrap-port=8000",), {}),
        (
            ("--kv-connector=offloading", "--p2p-connector-port=7000"),
            {"connector": "offloading", "peer_port": 7000},
        ),
        (("--secure-proxy",), {}),
        (("--secure-proxy=false",), {"listen_tls": None}),
        (("--secure-serving",), {}),
        (("--secure-serving=false",), {"listen_tls": None}),
        (("--secure-serving=false", "--secure-proxy=false"), {"listen_tls": None}),
        (("--tls-min-version=VersionTLS13",),
         {"listen_tls": ListenTls(minimum=ssl.TLSVersion.TLSv1_3)}),
        (("--tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
          "--tls-cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA"),
         {"listen_tls": ListenTls(
             ciphers="ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-SHA")}),
        (("--metrics-cert-dir=", "--enable-speculative-prefill=false"), {}),
        (("--enable-prefiller-sampling",), {"sample_prefillers": True}),
        (("--tracing=true",), {"spans": True}),
        (("--metrics-port=9100",), {"admin": HostPort("*", 9100)}),
        (("--metrics-port=0",), {}),
        (("--prefill-max-retries=1",), {"retries": 1}),
        (("--zap-log-level=debug",), {"log_level": "debug"}),
        (("--zap-log-level=3",), {"log_level": "info"}),
        (("-v=4",), {"log_level": "debug"}),
        (("-v", "2"), {"log_level": "info"}),
        (("--zap-devel",), {"log_level": "debug"}),
        (("--zap-encoder=json",), {"log_format": LogFormat.JSON}),
        (("--zap-encoder=console",), {}),
        (("--zap-log-level=panic",), {"log_level": "error"}),
        (("--configuration={port: 8085, secure-proxy: false}",),
         {"listen": HostPort("*", 8085), "listen_tls": None}),
        (("--prefill-allow=10.1.0.0/16", "--enable-ssrf-protection", "--inference-pool=a/b"),
         {"allow": parse_allow(("10.1.0.0/16",))}),
        (("--ec-connector=",), {}),
        (("--moriio-write-mode=false", "--moriio-dp-size=1", "--enable-p2p-pull=false"), {}),
    ],
)  # fmt: skip
def test_what_a_flag_becomes(arguments: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Beside its own effect, any flag turns llm-d's defaults on."""
    defaults = {
        "listen_tls": ListenTls(),
        "allow": parse_allow(PRIVATE_NETWORKS),
        "spans": False,
    }
    assert settings(*arguments) == Settings(**defaults | changes)


@pytest.mark.parametrize(
    ("arguments", "tls"),
    [
        (("--enable-tls=prefiller,decoder",), (True, True, False, False)),
        (("--enable-tls=decoder", "--enable-tls=encoder"), (True, False, False, False)),
        (("--prefiller-use-tls", "--decoder-use-tls=false"), (False, True, False, False)),
        (("--decoder-use-tls", "--vllm-port=9"), (True, False, False, False)),
        (("--tls-insecure-skip-verify=decoder",), (False, False, True, False)),
        (("--prefiller-tls-insecure-skip-verify",), (False, False, False, True)),
    ],
)
def test_stages_of_tls(arguments: tuple[str, ...], tls: tuple[bool, ...]) -> None:
    made = settings(*arguments).tls
    assert (made.engine, made.prefill, made.unverified_engine, made.unverified_prefill) == tls


def test_the_variables_of_llm_d_are_read_and_turn_no_defaults_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_BOOTSTRAP_PORT", "9998")
    monkeypatch.setenv("INFERENCE_POOL", "pool")
    monkeypatch.setenv("ENABLE_PREFILLER_SAMPLING", "true")
    # What Kubernetes sets beside a Service of that name.
    monkeypatch.setenv("TANDEM_SIDECAR_PORT", "tcp://10.0.0.1:80")
    made = settings("--connector=mooncake")
    assert made == Settings(connector="mooncake", peer_port=9998, sample_prefillers=True)
    assert lines() == ()


def test_plan_keys_leave_no_header_trusted(tmp_path: Path) -> None:
    (tmp_path / "20260101T000000Z").write_bytes(b"k" * 32)
    assert settings("--port=1", "--plan-key-dir", str(tmp_path)).allow == AllowList()
    assert lines("--port=1", "--plan-key-dir", str(tmp_path)) == ()


def test_a_flag_without_effect_says_so_in_one_line() -> None:
    flags = ("--port=1", "--pool-group=x", "--moriio-tp-size=8", "--decode-chunk-size=0")
    [pool, speculative, moriio, trust] = lines(*flags, "--enable-speculative-prefill")
    assert speculative.startswith("--enable-speculative-prefill has no effect: ")
    assert pool.startswith("--pool-group has no effect: ")
    assert moriio == "--moriio-tp-size has no effect: needs --moriio-write-mode"
    assert "--prefill-allow" in trust


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ec-connector=ec-nixl",), "--ec-connector': refused: .*leave it out"),
        (("--kv-connector=sglang",), "SGLang .*use one of nixl"),
        (("--connector=shared-storage",), "shared storage.*use one of nixl"),
        (("--moriio-write-mode",), "--kv-connector=nixlv2"),
        (("--moriio-dp-size=8",), "--moriio-dp-size"),
        (("--enable-ssrf-protection", "--inference-pool=a/b"), "--prefill-allow.*--plan-key-dir"),
        (("--enable-tls=prefill",), "stages are decoder, encoder, prefiller"),
        (("--port=8000", "--listen=1.2.3.4:1"), "--port and --listen"),
        (("--vllm-port=8000", "--engine=http://h:1"), "--vllm-port and --engine"),
        (("--port=65535", "--data-parallel-size=2"), "--port: 65535"),
        (("--port=0",), "--port: 0"),
        (("--data-parallel-size=0",), "--data-parallel-size"),
        (("--secure-proxy=maybe",), "not true or false"),
        (("--secure-serving", "--secure-proxy=false"), "set the same: give one"),
        (("--tls-min-version=1.2",), "--tls-min-version: write VersionTLS12 or VersionTLS13"),
        (("--tls-min-version=VersionTLS11",), "VersionTLS12 or VersionTLS13"),
        (("--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA",), "RC4_128_SHA is not allowed: use"),
        (
            ("--metrics-cert-dir=/certs",),
            "--metrics-cert-dir': refused: the admin port.*NetworkPolicy",
        ),
        (("--zap-encoder=xml",), "json or console"),
        (("--zap-log-level=loud",), "--zap-log-level"),
        (("--configuration={porte: 1}",), "porte: no such flag"),
        (("--cert-path=/does/not/exist",), "/does/not/exist"),
        (("--prefill-retry-backoff=1",), "not a duration"),
    ],
)
def test_refused_values_end_with_the_reason(arguments: tuple[str, ...], message: str) -> None:
    assert re.search(message, error(*arguments))


def test_every_refused_flag_says_what_to_use() -> None:
    for flag in FLAGS:
        if flag.treatment is Treatment.REFUSED:
            assert re.search(r"use|leave", flag.text), flag.name


def test_a_file_of_flags_may_hold_them_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text(
        "port: 8085\nmodel-server-port: 8203\nsecure-proxy: false\nenable-tls: [decoder]"
    )
    for name in ("--configuration-file", "--config"):
        made = settings(f"{name}={file}", "--vllm-port=8300")
        assert (made.listen.port, made.engine.port) == (8085, 8300)
        assert (made.listen_tls, made.tls.engine) == (None, True)


def test_the_older_name_in_a_file_yields_to_the_newer_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("secure-proxy: false\ntls-cipher-suites: [TLS_AES_128_GCM_SHA256]")
    tls = settings(f"--configuration-file={file}", "--secure-serving").listen_tls
    # With no cipher of TLS 1.2 in the list, only TLS 1.3 is left.
    assert tls == ListenTls(minimum=ssl.TLSVersion.TLSv1_3)


@component
async def test_the_command_line_of_llm_d_s_chart_splits_a_request_over_tls() -> None:
    """As llm-d's manifests start it, with a free port and loopback allowed."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    async with FakePrefill() as prefill, FakeDecode() as decode:
        process = await spawn(
            *(f"--port={port}", f"--vllm-port={decode.address.port}", "--connector=nixlv2"),
            *("--zap-encoder=json", "--inference-pool=default/pool", "--prefill-allow=127.0.0.0/8"),
            *("--admin=127.0.0.1:0", "--secure-serving", "--tls-min-version=VersionTLS13"),
        )
        try:
            assert process.stderr is not None
            log = ""
            async with asyncio.timeout(60):
                while not re.search(rf"serving on \*:{port}", log):
                    line = (await process.stderr.readline()).decode()
                    assert line, log
                    log += line
            assert '"message":"--inference-pool has no effect' in log
            named = {"x-prefiller-host-port": str(prefill.address)}
            body = {"model": "m", "prompt": "p", "max_tokens": 2}
            url, outdated = f"https://127.0.0.1:{port}/v1/completions", ssl.create_default_context()
            outdated.check_hostname, outdated.verify_mode = False, ssl.CERT_NONE
            outdated.maximum_version = ssl.TLSVersion.TLSv1_2
            async with aiohttp.ClientSession() as http:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await http.post(url, json=body, headers=named, ssl=outdated)
                async with http.post(url, json=body, headers=named, ssl=False) as answer:
                    assert answer.status == 200
                    assert answer.headers["x-continuum-routing-path"] == "prefill_then_decode"
        finally:
            process.kill()
            await process.communicate()
        assert len(prefill.requests) == len(decode.requests) == 1
        assert decode.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is True


@component
async def test_a_port_in_use_names_the_address() -> None:
    async with FakeDecode() as other:
        status, err = await fails(f"--port={other.address.port}", "--admin=127.0.0.1:0")
    assert status == 1
    assert "cannot listen there" in err
