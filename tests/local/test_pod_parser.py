from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_local.errors import SetupError
from tandem_local.pod_parser import expand, parse_pod, relocate

from .pods import container, pod


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)/x", "1/x"),
        ("$(A)$(B)", "12"),
        ("$(NONE)", "$(NONE)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("100$", "100$"),
    ],
)
def test_variables_expand_as_kubernetes_does(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


@settings(max_examples=30)
@given(st.text())
def test_text_without_a_dollar_sign_is_unchanged(text: str) -> None:
    assert expand(text.replace("$", ""), {"A": "1"}) == text.replace("$", "")


MOUNTS = {"/keys": Path("/run/k"), "/keys/deep/": Path("/run/d"), "/tmp": Path("/run/t")}


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("/keys", "/run/k"),
        ("/keys/k1", "/run/k/k1"),
        ("/keys/deep/x", "/run/d/x"),
        ("--dir=/keys", "--dir=/run/k"),
        ('{"path": "/keys/k1", "tmp": "/tmp"}', '{"path": "/run/k/k1", "tmp": "/run/t"}'),
        ("/keys:/tmp", "/run/k:/run/t"),
        ("/keyset /keys.d /my/keys x/keys http://host/keys ~/keys", None),
    ],
)
def test_a_mount_path_at_the_start_of_a_path_is_replaced(text: str, moved: str | None) -> None:
    assert relocate(text, MOUNTS) == (moved or text)


def test_a_directory_that_contains_another_mount_path_is_not_replaced_again() -> None:
    assert relocate("/a/x", {"/a": Path("/b"), "/b": Path("/c")}) == "/b/x"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "a pod has no metadata.name"),
        ({"metadata": "a"}, "a pod has no metadata.name"),
        ({"metadata": {"name": "a"}}, "pod a: not a valid Pod: spec is missing"),
        ({"metadata": {"name": "a"}, "spec": {"containers": [{}]}}, "name is missing"),
        ({"metadata": {"name": "a"}, "data": {}}, "pod a: data: the local runner does"),
        (pod("a", container(env=[{"name": "X", "value": 1}])), "Expected `str`, got `int`"),
        (
            pod("a", container(env=[
                {"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}
            ])),
            "fieldRef spec.x: the local runner does not support this field",
        ),
        (
            pod("a", container(env=[{"name": "X", "valueFrom": {"secretKeyRef": {"key": "k"}}}])),
            r"spec.containers\[0\].env\[2\].valueFrom.secretKeyRef: the local runner does",
        ),
    ],
)  # fmt: skip
def test_invalid_and_unsupported_pods_are_refused(
    document: dict[str, object], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        parse_pod(document, address="127.1.1.1", volume=lambda _name, _raw: Path("/"))


def test_a_probe_of_localhost_goes_to_the_pods_address() -> None:
    probe = {"httpGet": {"host": "127.0.0.1", "port": 80, "path": "/x"}, "periodSeconds": 2}
    parsed = parse_pod(
        pod("a", container(readinessProbe=probe)),
        address="127.1.1.1",
        volume=lambda _name, _raw: Path("/"),
    )
    probe_spec = parsed.containers[0].readiness
    assert probe_spec is not None
    assert (probe_spec.handler.host, probe_spec.period) == ("127.1.1.1", 2.0)  # type: ignore[union-attr]  # it is an HttpGet


def test_a_wildcard_address_becomes_the_pods_address() -> None:
    engine = container("engine", command=["vllm"], args=['{"endpoint":"tcp://*:5557"}'])
    parsed = parse_pod(pod("a", engine), address="127.1.1.1", volume=lambda _name, _raw: Path("/"))
    assert parsed.containers[0].command[-1] == '{"endpoint":"tcp://127.1.1.1:5557"}'
