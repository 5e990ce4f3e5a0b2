"""HTTP filters, routes and error replies of the clients' listener, as parts of the bootstrap. Pure.

A request passes the filters from first to last, its response from last to first.
"""

import json
from pathlib import PurePosixPath
from typing import Final, Literal

from tandem_contract import headers as wire
from tandem_contract.api_grammar import error_body
from tandem_contract.api_paths import NOT_SERVED, ApiPaths
from tandem_contract.openai_errors import TYPES
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.stalls import STALL_SECONDS

from .clusters import ALTERNATE, EPP, FALLBACK, PICKED, TYPE, Json

BodyMode = Literal["FULL_DUPLEX_STREAMED", "BUFFERED"]
"""How ext_proc sends a request's body to the EPP."""

_PICK_TIMEOUT: Final = "5s"
"""Longest wait for the EPP, whose decision takes about a millisecond. After it the request goes to
any decode pod."""
_LONGEST_PICK: Final = "3600s"
"""Longest time that the EPP may ask for instead, for a request that it holds. Envoy allows no
longer."""
_LOG_FLUSH: Final = "0.2s"
"""How late the EPP learns that an answer ended too early."""
_ERROR_FORMS: Final = (PATHS[RequestKind.MESSAGES], "/")
"""Prefixes of paths whose errors have a form of their own, and of all others."""
EXT_PROC: Final = "http.ext_proc"
"""Name of the filter that asks the EPP, without its prefix."""
API_KEY_AUTH: Final = "http.api_key_auth"
"""Name of the filter that refuses clients without an API key, without its prefix."""


def extension_filter(name: str, typed_config: Json) -> Json:
    """A filter of Envoy's extension registry with its typed configuration."""
    return {"name": full_filter_name(name), "typed_config": typed_config}


def full_filter_name(filter_name: str) -> str:
    """A filter's name in Envoy's extension registry."""
    return f"envoy.filters.{filter_name}"


ROUTER: Final = extension_filter(
    "http.router", {"@type": TYPE + "extensions.filters.http.router.v3.Router"}
)
"""The last HTTP filter of every chain: sends the request where its route says."""


def drop_internal_headers() -> Json:
    """Removes the headers that only our components may set from clients' requests."""
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": TYPE
            + "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": name} for name in sorted(wire.INTERNAL)],
        },
    }


def api_key_auth(file: str) -> Json:
    """Refuses clients that send no API key of those in `file`, which `routing.api_keys` writes.

    Envoy reads the file anew whenever another one is moved into its place. Until it has read one,
    its listener accepts no connection.
    """
    source = {"path": file, "watched_directory": {"path": str(PurePosixPath(file).parent)}}
    return {
        "name": full_filter_name(API_KEY_AUTH),
        "config_discovery": {
            "config_source": {"path_config_source": source, "resource_api_version": "V3"},
            "type_urls": [TYPE + "extensions.filters.http.api_key_auth.v3.ApiKeyAuth"],
        },
    }


def drop_answer_headers() -> Json:
    """Removes from responses what sidecars tell only the EPP and Envoy."""
    # Responses pass the filters from last to first, so ext_proc has shown the times to the EPP
    # before this filter removes them. The EPP removes them too, but it may have died meanwhile.
    return {
        "@type": TYPE + "extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {
            "response_mutations": [{"remove": name} for name in (wire.TIMING, wire.NOT_SENT)]
        },
    }


def error_replies(*, buffered: bool) -> list[Json]:
    """Mappers that give Envoy's own error responses the form of their API, as the EPP's have.

    `buffered`: whether Envoy buffers request bodies, and so rejects large ones itself.
    """
    # Envoy sets a response flag on the errors it makes; those of the EPP have none and must pass
    # unchanged. It sets none on these two. The EPP asks for no key, and sees no body that is too
    # large for Envoy's buffer.
    unflagged = {401, 413} if buffered else {401}
    # The first that matches is used: the prefix of all paths comes last.
    return [
        _error_reply(prefix, status, is_flagged=status not in unflagged)
        for prefix in _ERROR_FORMS
        for status in sorted(TYPES)
    ]


def _error_reply(prefix: str, status: int, *, is_flagged: bool) -> Json:
    code = {"comparison": {"op": "EQ", "value": {"default_value": status, "runtime_key": "none"}}}
    path = {"name": ":path", "string_match": {"prefix": prefix}}
    conditions: list[Json] = [{"status_code_filter": code}, {"header_filter": {"header": path}}]
    if is_flagged:
        conditions.append({"response_flag_filter": {}})
    return {
        "filter": {"and_filter": {"filters": conditions}},
        "body_format_override": {
            "json_format": json.loads(error_body(prefix, status, "%LOCAL_REPLY_BODY%"))
        },
    }


def ext_proc(body_mode: BodyMode, response_bodies: bool, *, needs_epp: bool) -> Json:
    """Sends each request to the EPP, which answers with headers that name the pod to use."""
    return {
        "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        # No timeout on the gRPC stream: it lasts as long as the request.
        "grpc_service": {"envoy_grpc": {"cluster_name": EPP}, "timeout": "0s"},
        # Without an answer of the EPP the request passes unpicked, and the second route serves it.
        "failure_mode_allow": not needs_epp,
        # Where it cannot pass: the EPP may have had the body already, when it died.
        "status_on_error": {"code": "ServiceUnavailable"},
        # The EPP asks for the body of a response only where it must name the model as the client
        # did: a message for each chunk would cost every other response.
        "allow_mode_override": True,
        "message_timeout": _PICK_TIMEOUT,
        "max_message_timeout": _LONGEST_PICK,
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": body_mode,
            # FULL_DUPLEX_STREAMED requires trailers; without any they cost nothing.
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED" if response_bodies else "NONE",
            # Keeps the stream open until the response ends, which tells the EPP that it ended.
            "response_trailer_mode": "SEND",
        },
        # Which pod answered, and whether an error is the pod's or Envoy's own. They cost nothing:
        # they come with the response headers.
        "response_attributes": [wire.UPSTREAM_ADDRESS, wire.CODE_DETAILS],
        "metadata_options": {
            "receiving_namespaces": {"untyped": [wire.METADATA_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [wire.METADATA_NAMESPACE, wire.SUBSET_NAMESPACE]},
        },
    }


def broken_answer_log() -> Json:
    """Tells the EPP, over its gRPC port, of answers that ended too early by a pod's fault."""
    # The connection to the upstream ended, was reset, or broke HTTP; no byte for the stream idle
    # timeout.
    failed = {"response_flag_filter": {"flags": ["UC", "UR", "UPE", "SI"]}}
    # The client closed its connection or stream, after so long that the pod may have stalled.
    left = {"response_flag_filter": {"flags": ["DC", "DR"]}}
    milliseconds = {"default_value": round(1000 * STALL_SECONDS), "runtime_key": "none"}
    late = {"duration_filter": {"comparison": {"op": "GE", "value": milliseconds}}}
    gave_up = {"and_filter": {"filters": [left, late]}}
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {"or_filter": {"filters": [failed, gave_up]}},
        "typed_config": {
            "@type": TYPE + "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "broken answers",
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": EPP}},
                "buffer_flush_interval": _LOG_FLUSH,
            },
        },
    }


def routes(body_limit: int, api: ApiPaths) -> Json:
    """Routes of the API's paths to the pod that the EPP picked, or else to any decode pod; 404 for
    every other path.

    `body_limit` is the largest request body in bytes that Envoy buffers.
    """
    # Matched as the client wrote them: Envoy does not normalise paths unless it is told to, so a
    # path that an engine could read as another one matches none of these.
    matches: list[Json] = [{"path": path} for path in api.exact]
    matches += [{"safe_regex": {"regex": pattern}} for pattern in api.patterns]
    return {
        "name": "routes",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "request_body_buffer_limit": body_limit,
                "routes": [
                    *(route for match in matches for route in _pod_routes(match)),
                    *map(_refusal, _ERROR_FORMS),
                ],
            }
        ],
    }


def _pod_routes(match: Json) -> list[Json]:
    picked = {"name": wire.DESTINATION_ENDPOINT, "present_match": True}
    alternate = {"name": wire.ALTERNATE_ENDPOINT, "present_match": True}
    either = {"inline_cluster_specifier_plugin": {"extension": _PICKED_THEN_ALTERNATE}}
    return [
        {
            "match": {**match, "headers": [picked, alternate]},
            "route": _route(either, _RETRY_AT_ALTERNATE),
        },
        {
            "match": {**match, "headers": [picked]},
            "route": _route({"cluster": PICKED}, _RETRY_UNSENT),
        },
        {"match": match, "route": _route({"cluster": FALLBACK}, _RETRY_ELSEWHERE)},
    ]


def _refusal(prefix: str) -> Json:
    return {
        "match": {"prefix": prefix},
        "direct_response": {
            "status": 404,
            "body": {"inline_string": error_body(prefix, 404, NOT_SERVED).decode()},
        },
        "response_headers_to_add": [
            {
                "header": {"key": "content-type", "value": "application/json"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
        # The EPP need not decide on it.
        "typed_per_filter_config": {
            full_filter_name(EXT_PROC): {
                "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
                "disabled": True,
            }
        },
    }


_PICKED_THEN_ALTERNATE: Final[Json] = {
    "name": "envoy.router.cluster_specifier_plugin.priority_group",
    "typed_config": {
        "@type": TYPE
        + "extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier",
        "priority_groups": [
            {"name": cluster, "clusters": [{"cluster_name": cluster, "weight": 1}]}
            for cluster in (PICKED, ALTERNATE)
        ],
    },
}
"""The cluster of the first attempt, then of the second."""
_RETRY_UNSENT: Final[Json] = {
    # Retries the same address, and only when the pod cannot have read any of the request. The
    # client gets a 503 of the picked pod as it is; the EPP avoids that pod in its next picks.
    "retry_on": "connect-failure,refused-stream,reset-before-request",
    "num_retries": 1,
}
_RETRY_AT_ALTERNATE: Final[Json] = {
    # The same at another address, and when the sidecar answers that its engine got nothing.
    **_RETRY_UNSENT,
    "retry_on": f"{_RETRY_UNSENT['retry_on']},retriable-headers",
    "retriable_headers": [{"name": wire.NOT_SENT, "present_match": True}],
    "refresh_cluster_on_retry": True,
}
_RETRY_ELSEWHERE: Final[Json] = {
    # A sidecar that answers 503 has not forwarded the request, so another pod may take it.
    "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
    "retriable_status_codes": [503],
    "num_retries": 2,
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {
                "@type": TYPE + "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
            },
        }
    ],
    "host_selection_retry_max_attempts": 5,
}


def _route(target: Json, retry: Json) -> Json:
    # No route timeout, since a response may take hours; the stream idle timeout ends dead streams.
    return {**target, "timeout": "0s", "retry_policy": retry}
