import pytest

from tandem_kube.errors import error_of
from tandem_operator.runtime.write_errors import failure_from_error, template_failure


@pytest.mark.parametrize(
    ("status", "reason", "message", "expected"),
    [
        (403, "Forbidden", 'pods "p-0" is forbidden: exceeded quota: q, used: 1', "QuotaExceeded"),
        (403, "Forbidden", "failed quota: q: must specify requests.memory", "QuotaExceeded"),
        (403, "Forbidden", 'violates PodSecurity "restricted:latest"', "AdmissionDenied"),
        (400, "", 'admission webhook "x" denied the request: no', "AdmissionDenied"),
        (422, "Invalid", "ValidatingAdmissionPolicy 'x' denied request: no", "AdmissionDenied"),
        (403, "Forbidden", "because it is being terminated", "NamespaceTerminating"),
        (403, "Forbidden", 'User "x" cannot create resource "pods"', "Forbidden"),
        (422, "Invalid", 'Pod "x" is invalid: spec.containers', "Refused"),
        (409, "AlreadyExists", 'pods "p-0" already exists', "NameTaken"),
    ],
)  # fmt: skip
def test_failure_has_a_reason_and_the_servers_message(
    status: int, reason: str, message: str, expected: str
) -> None:
    failure = failure_from_error(error_of(status, {"reason": reason, "message": message}))
    assert failure.reason == expected
    assert message in failure.message


@pytest.mark.parametrize(
    ("status", "reason", "message", "lasts"),
    [
        (422, "Invalid", 'Pod "x" is invalid: spec.containers', True),
        (403, "Forbidden", "no PriorityClass with name x was found", True),
        (403, "Forbidden", "exceeded quota: q, used: 1", False),
        (409, "AlreadyExists", 'pods "p-0" already exists', False),
        (400, "BadRequest", 'admission webhook "x" does not support dry run', False),
    ],
)
def test_only_lasting_dry_run_errors_are_template_failures(
    status: int, reason: str, message: str, lasts: bool
) -> None:
    err = error_of(status, {"reason": reason, "message": message})
    assert (template_failure(err) is not None) == lasts
