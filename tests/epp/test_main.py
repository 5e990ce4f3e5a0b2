"""The command: usage errors, ports in use, reload, graceful shutdown."""

import asyncio
import dataclasses
import re
import socket
import sys
from pathlib import Path

import aiohttp
import click
import pytest
from click.testing import CliRunner

from tandem_epp.main import main
from tandem_epp.settings import Settings

from .real import Backend, epp, serving, until

SERVING = "disaggregated_serving."
KUBERNETES = ("--discovery", "kubernetes")
SELECTED = ("--namespace", "n", "--selector", "app=vllm")
GOOD = "backends: [{name: a, url: 'http://127.0.0.1:1'}]\n"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Missing option '--config'"),
        (("--wrong",), "No such option '--wrong'"),
        (
            ("--config", "FILE", "--tls-dir", "/", "--ext-proc-server", "grpcio"),
            "TLS needs --ext-proc-server http2",
        ),
        (("--listen", "nowhere"), "HOST:PORT"),
        (("--max-body", "-1"), "-1 is not in the range"),
        (("--config", "FILE", "--body-timeout", "0"), "0.0 is not in the range"),
        (
            ("--config", "FILE", "--max-body", "1000", "--held-bytes", "1999"),
            "--held-bytes must be at least twice --max-body: 2000",
        ),
        (("--config", "FILE", *KUBERNETES), "needs --namespace"),
        (("--config", "FILE", *KUBERNETES, "--namespace", "n"), "either --endpoint or --selector"),
        (
            ("--config", "FILE", *KUBERNETES, *SELECTED, "--endpoint", "e"),
            "either --endpoint or --selector",
        ),
        (("--config", "FILE", *KUBERNETES, *SELECTED), "router.yaml:1: backends: .*cluster"),
        (
            ("--config", "FILE", *KUBERNETES, "--namespace", "N", "--endpoint", "e"),
            "'N' is not a valid name",
        ),
        (("--config", "FILE", *KUBERNETES, "--namespace", "n", "--selector", "a=b=c"), "'a=b=c'"),
        (("--config", "FILE", *KUBERNETES, *SELECTED, "--target-port", "0"), "0 is not in"),
        (("--config", "FILE", "--history", "-1"), "-1 is not in the range"),
        (("--config", "FILE", "--otlp-endpoint", "x"), "'x' is not the URL of a collector"),
        (("--config", "FILE", "--namespace", "x"), "need --discovery kubernetes"),
        (("--config", "FILE", "--inference-pool", "x"), "need --discovery kubernetes"),
        (("--config", "FILE", *KUBERNETES, *SELECTED, "--inference-pool", "X"), "'X' is not a"),
        (("--config", "FILE", "--log-level", "trace"), "'trace' is not one of"),
        (("--config", "FILE", "--max-body", "16MiB"), "'16MiB' is not a valid integer"),
        (("--config", "FILE", "--plan-key-dir", "/nonexistent"), "does not exist"),
        (("--config", "FILE", "--api-path", "version"), "'version' is no path of an API"),
        (("--config", "/nonexistent.yaml"), "/nonexistent.yaml: cannot read it"),
    ],
)
def test_usage_errors_end_with_2(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(GOOD)
    status, stderr = invoke(*(str(file) if flag == "FILE" else flag for flag in flags))
    assert status == 2
    assert re.search(message, stderr)


def test_flags_have_the_defaults_of_the_settings() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings) if field.init}
    own = [flag for flag in main.params if flag.expose_value]
    flags = {flag.name: flag for flag in own if flag.name in defaults}
    # The others are set by several flags together, or only by llm-d's.
    assert defaults.keys() - flags.keys() == {
        *("pods", "tls", "config_text", "metrics_tls", "authorize_metrics", "drain_timeout"),
        *("tracing", "log_json", "subset_hints", "feature_gates"),
    }
    for name, flag in flags.items():
        if name not in ("config", "plan_key_dir", "mutual_tls"):
            assert flag.type_cast_value(click.Context(main), flag.default) == defaults[name]


def test_a_bad_file_ends_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("backends:\n- name: a\n  url: x\n")
    status, stderr = invoke("--config", str(file))
    assert status == 2
    assert stderr.startswith(f"error: {file}:3: backends[0].url:")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("selector", "good"),
    [
        ("app", True),
        ("!app, example.org/tier notin (a, b)", True),
        ("app=vllm,tier==x,zone!=y", True),
        ("app=", True),
        ("app in", False),
        ("app vllm", False),
        ("app=vllm,", False),
        ("app=vl lm", False),
    ],
)
def test_label_selectors(tmp_path: Path, selector: str, good: bool) -> None:
    flags = ("--namespace", "n", "--selector", selector)
    status, stderr = invoke("--config", str(tmp_path / "none"), *KUBERNETES, *flags)
    assert status == 2
    assert ("cannot read it" in stderr) is good
    assert ("is not a label selector" in stderr) is not good


def test_a_missing_cluster_configuration_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    file = tmp_path / "router.yaml"
    file.write_text("disaggregated_serving: {enabled: true}\n")
    status, stderr = invoke("--config", str(file), *KUBERNETES, *SELECTED)
    assert status == 2
    assert stderr.startswith("error: ")
    assert "KUBECONFIG" in stderr


@pytest.mark.parametrize(
    ("text", "has_keys", "unsent"),
    [
        ("disaggregated_serving: {prefill_timeout: 5s}", False, [SERVING + "prefill_timeout"]),
        ("disaggregated_serving: {prefill_timeout: 5s, kv_transfer_timeout: 5s}", False,
         [SERVING + "prefill_timeout", SERVING + "kv_transfer_timeout"]),
        ("disaggregated_serving: {prefill_timeout: 5s}", True, []),
        ("disaggregated_serving: {enabled: true}", False, []),
        ("resume: {enabled: true}", False, ["resume"]),
        ("resume: {enabled: true}", True, []),
        ("resume: {max_moves: 1}", False, []),
    ],
)  # fmt: skip
def test_what_no_plan_takes_to_the_sidecars_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    has_keys: bool,
    unsent: list[str],
) -> None:
    # Without a cluster the command ends after it has read its file.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    file, keys = tmp_path / "router.yaml", tmp_path / "keys"
    file.write_text(f"{text}\n")
    keys.mkdir()
    (keys / "k").write_bytes(b"0123456789abcdef")
    flags = ("--plan-key-dir", str(keys)) if has_keys else ()
    invoke("--config", str(file), *KUBERNETES, *SELECTED, *flags)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [re.findall(r"^([\w.]+) has no effect", message) for message in warnings] == [
        [name] for name in unsent
    ]


@pytest.mark.component
async def test_static_discovery_does_not_import_the_kubernetes_client() -> None:
    code = "import sys, tandem_epp.main; sys.exit('kubernetes' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@pytest.mark.component
@pytest.mark.parametrize("flag", ["--listen", "--health", "--metrics"])
def test_a_port_in_use_ends_with_1_and_one_line(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(GOOD)
    free = {"--listen", "--health", "--metrics"} - {flag}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        others = (word for other in free for word in (other, "127.0.0.1:0"))
        status, stderr = invoke("--config", str(file), flag, f"127.0.0.1:{port}", *others)
    assert status == 1
    assert stderr.startswith("error: ")
    assert port in stderr
    assert flag in stderr
    assert stderr.count("\n") == 1


@pytest.mark.component
async def test_a_changed_file_replaces_backends_and_sigterm_exits_with_0(tmp_path: Path) -> None:
    file, a, b = tmp_path / "router.yaml", Backend("a"), Backend("b")
    async with serving(a, b):
        file.write_text(f"backends: [{{name: a, url: 'http://127.0.0.1:{a.port}'}}]")
        async with epp(file) as picker, aiohttp.ClientSession() as session:
            assert 'tandem_epp_backend_healthy{backend="a"}' in await picker.figures()

            async def b_is_there() -> bool:
                return (await picker.figures()).get(
                    'tandem_epp_backend_healthy{backend="b"}'
                ) == 1.0

            file.write_text(
                f"backends: [{{name: b, url: 'http://127.0.0.1:{b.port}', role: decode}}]"
            )
            await until(b_is_there)
            assert 'tandem_epp_backend_healthy{backend="a"}' not in await picker.figures()
            async with session.get(f"http://127.0.0.1:{picker.health}/healthz") as response:
                assert response.status == 200
            picker.process.terminate()
            assert await picker.process.wait() == 0
