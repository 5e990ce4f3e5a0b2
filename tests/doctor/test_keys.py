"""A set whose pods do not prove themselves to each other is named, with the fix."""

from dataclasses import replace

from tandem_contract.paths import Role
from tandem_doctor.checks import run_checks
from tandem_doctor.cluster_pods import target_pod
from tandem_doctor.engine_command import parse_command
from tandem_doctor.facts import Engine, Facts, Sidecar
from tandem_doctor.findings import Finding, Severity
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair
from ..operator.rendered_pods import TORCH
from .test_checks import D, P

KEYS = ("--transfer-key-dir", "/keys")


def reference(base: Engine, *flags: str) -> Engine:
    assert base.command is not None
    command = parse_command(["tandem-engine", "--model", "m", *flags], {})
    transfer = base.command.kv_transfer_config
    return replace(base, command=replace(command, kv_transfer_config=transfer))


def found(*engines: Engine, sidecars: tuple[Sidecar, ...] = ()) -> list[Finding]:
    return [f for f in run_checks(Facts(engines, sidecars)) if f.check == "keys"]


def test_reference_engines_without_keys_are_named() -> None:
    first, second = found(reference(P), reference(D))
    assert (first.subject, second.subject) == (P.pod, D.pod)
    assert first.severity is Severity.WARNING
    assert first.fix is not None
    assert "--transfer-key-dir" in first.fix


def test_a_pair_of_which_one_has_keys_is_broken() -> None:
    broken, warning = found(reference(P, *KEYS), reference(D))
    assert (broken.severity, warning.severity) == (Severity.BROKEN, Severity.WARNING)
    assert D.pod in broken.detail


def test_other_engines_and_those_with_keys_are_fine() -> None:
    # P and D are vLLM's.
    assert found(P, D) == []
    assert found(reference(P, *KEYS), reference(D, *KEYS)) == []
    assert found(replace(reference(P), role=Role.UNIFIED)) == []


def test_a_sidecar_without_plan_keys_is_named() -> None:
    sidecars = tuple(Sidecar(str(keys), has_plan_keys=keys) for keys in (True, None, False))
    (finding,) = found(sidecars=sidecars)
    assert (finding.severity, finding.subject) == (Severity.WARNING, "False")


def test_the_operators_pods_have_keys() -> None:
    for has_epp in (True, False):
        routing = {"routing": {"epp": {"enabled": has_epp}}}
        (pool_set,) = pair(TORCH, {"accelerator": {}, **routing})
        prefill, decode = (
            target_pod(pod, lambda *_: None, inside=False)  # type: ignore[arg-type,return-value]
            for pod in (pods(pool_set)[0], pods(pool_set)[1])
        )
        for target in (prefill, decode):
            assert target.command is not None
            assert target.command.is_reference
            assert "transfer-key-dir" in target.command.flags
        assert decode.has_plan_keys is has_epp
        assert prefill.has_plan_keys is None
