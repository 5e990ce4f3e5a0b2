"""A refused write as a Failure: the reason in one word, the message the API server's own."""

from typing import Final

from tandem_kube.errors import (
    AlreadyExists,
    ApiError,
    Forbidden,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)

from ..observed import Failure

NOT_ABOUT_THE_OBJECT: Final = (Unreachable, TooManyRequests, Unauthorized)
"""Errors that say nothing about what was written: the whole pass is tried again later."""

_IN_MESSAGE: Final = (
    ("exceeded quota", "QuotaExceeded"),
    ("failed quota", "QuotaExceeded"),
    ("violates PodSecurity", "AdmissionDenied"),
    ("admission webhook", "AdmissionDenied"),
    ("ValidatingAdmissionPolicy", "AdmissionDenied"),
    ("is being terminated", "NamespaceTerminating"),
    ("Apply failed with", "NameTaken"),
)
"""The API server has one reason, Forbidden, for all of these; its words tell them apart."""

_ABOUT_THE_MOMENT: Final = frozenset({"QuotaExceeded", "NamespaceTerminating", "NameTaken"})
"""Room, a namespace or a name; a rollout may well make room."""


def failure_of(err: ApiError) -> Failure:
    """Why the API server does not take the object as it stands."""
    for words, reason in _IN_MESSAGE:
        if words in err.message:
            return Failure(reason, err.message)
    if isinstance(err, AlreadyExists):
        return Failure("NameTaken", f"{err.message}: it is not this pool's; rename or delete it")
    return Failure("Forbidden" if isinstance(err, Forbidden) else "Refused", err.message)


def lasting_failure_of(err: ApiError) -> Failure | None:
    """The same, of a pod tried out; None when it says nothing against pods like it."""
    failure = failure_of(err)
    if failure.reason in _ABOUT_THE_MOMENT or "does not support dry run" in err.message:
        return None
    return failure
