from pathlib import Path

import pytest

from tandem_contract.plan import load_keys
from tandem_local.errors import SetupError
from tandem_local.pod_fields import check_fields
from tandem_local.router import envoy_pod, epp_pod, find_envoy, write_plan_key


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_envoy_is_found_where_it_is_named_then_beside_the_environment_then_on_path(
    tmp_path: Path,
) -> None:
    named = program(tmp_path / "named/envoy")
    on_path = program(tmp_path / "bin/envoy")
    environ = {"PATH": str(on_path.parent)}
    venv = tmp_path / "checkout/.venv"
    assert find_envoy(environ, venv) == on_path
    beside = tmp_path / "checkout/.venv-envoy/lib/python3.11/site-packages/envoy/_bin/envoy"
    assert find_envoy(environ, venv) == on_path
    assert program(beside) == find_envoy(environ, venv)
    assert find_envoy({**environ, "TANDEM_ENVOY": str(named)}, venv) == named


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PATH": ""}, "Envoy is not installed: run make setup"),
        ({"TANDEM_ENVOY": "/no/such"}, "TANDEM_ENVOY=/no/such is not an executable file"),
        ({"TANDEM_ENVOY": "/"}, "TANDEM_ENVOY=/ is not an executable file"),
    ],
)
def test_no_envoy(tmp_path: Path, environ: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        find_envoy(environ, tmp_path / ".venv")


def test_every_run_has_a_new_key(tmp_path: Path) -> None:
    write_plan_key(tmp_path / "keys")
    first = load_keys(tmp_path / "keys")
    write_plan_key(tmp_path / "keys")
    second = load_keys(tmp_path / "keys")
    assert len(first) == len(second) == 1
    assert first != second
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "keys").iterdir())


def test_the_routers_pods_use_supported_fields_only() -> None:
    check_fields(epp_pod(Path("/c"), Path("/k"), None))
    check_fields(envoy_pod(Path("/envoy"), Path("/b")))
