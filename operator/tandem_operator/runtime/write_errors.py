"""Translate the error of a failed write into a Failure for the pool's status."""

from typing import Final

from tandem_kube.errors import (
    AlreadyExists,
    ApiError,
    Fenced,
    Forbidden,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)

from ..observed import Body, Failure

TRANSIENT_ERRORS: Final = (Unreachable, TooManyRequests, Unauthorized, Fenced)
"""Errors that say nothing about the object written: the whole reconciliation is retried later."""

_REASON_BY_PHRASE: Final = (
    ("exceeded quota", "QuotaExceeded"),
    ("failed quota", "QuotaExceeded"),
    ("violates PodSecurity", "AdmissionDenied"),
    ("admission webhook", "AdmissionDenied"),
    ("ValidatingAdmissionPolicy", "AdmissionDenied"),
    ("is being terminated", "NamespaceTerminating"),
    ("Apply failed with", "NameTaken"),
)
"""The API server sends the one reason Forbidden for most of these; only its message differs."""

_NO_IMAGE_VOLUMES: Final = (
    "model.source.oci: this cluster has no image volumes. Use Kubernetes 1.35 or newer, or turn on"
    " the feature gate ImageVolume of API server and kubelets (from 1.33), or give another source"
)

_PASSING_REASONS: Final = frozenset({"QuotaExceeded", "NamespaceTerminating", "NameTaken"})
"""Reasons that lie in the state of the cluster and not in the pod template. A quota, for example,
may have room again once the rollout has removed an old pod."""


def failure_from_error(err: ApiError) -> Failure:
    """Why the API server refused the object as it stands, with the server's own message."""
    # The phrase first: it is more exact than the error's class.
    for phrase, reason in _REASON_BY_PHRASE:
        if phrase in err.message:
            return Failure(reason, err.message)
    if isinstance(err, AlreadyExists):
        message = f"{err.message}: it does not belong to this pool; rename or delete it"
        return Failure("NameTaken", message)
    return Failure("Forbidden" if isinstance(err, Forbidden) else "Refused", err.message)


def template_failure(err: ApiError) -> Failure | None:
    """Why every pod of a template would be refused, from the dry run of one.

    None when the error says nothing about the template.
    """
    failure = failure_from_error(err)
    # A webhook with side effects refuses every dry run, whatever the template is.
    if failure.reason in _PASSING_REASONS or "does not support dry run" in err.message:
        return None
    return failure


def image_volume_failure(pod: Body, answer: Body) -> Failure | None:
    """Whether the API server dropped image volumes from a pod, as one without them does, silently.

    `answer` is what it made of `pod` in a dry run.
    """
    sent, kept = (
        {volume["name"] for volume in body["spec"].get("volumes", ()) if "image" in volume}
        for body in (pod, answer)
    )
    return None if sent <= kept else Failure("NoImageVolumes", _NO_IMAGE_VOLUMES)
