import pytest

from tandem_kube.errors import error_of
from tandem_operator.runtime.write_errors import failure_from_error, template_failure


@pytest.mark.parametrize(
    ("status", "reason", "message", "wanted"),
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
def test_the_reason_is_one_word_and_the_message_the_servers(
    status: int, reason: str, message: str, wanted: str
) -> None:
    failure = failure_from_error(error_of(status, {"reason": reason, "message": message}))
    assert failure.reason == wanted
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
def test_a_pod_tried_out_tells_what_is_wrong_with_all_like_it(
    status: int, reason: str, message: str, lasts: bool
) -> None:
    err = error_of(status, {"reason": reason, "message": message})
    assert (template_failure(err) is not None) == lasts
