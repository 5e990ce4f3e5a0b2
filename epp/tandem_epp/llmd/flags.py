"""Every flag that the EPP of llm-d-router 0.10 or of its main branch after it accepts, and what
becomes of it here.

Flags of the kinds `works` and `not needed` keep llm-d's meaning. For a flag without effect the log
has a line with the reason; a refused one ends the process with it.
"""

from collections.abc import Mapping
from typing import Final

from tandem_contract.go_flags import GO_BOOL, GO_DURATION, GO_INT, GO_INTS, GO_STRINGS
from tandem_contract.llmd_flags import LlmdFlag, Treatment

FEATURE_GATES: Final = "feature-gates"

_WORKS, _NOT_NEEDED = Treatment.WORKS, Treatment.NOT_NEEDED
_NO_EFFECT, _REFUSED = Treatment.NO_EFFECT, Treatment.REFUSED
_ENGINES: Final = "as in llm-d, which names `engineConfigs`; the EPP knows vLLM's metrics"

FLAGS: Final = (
    LlmdFlag(
        "pool-name", _WORKS,
        "the InferencePool whose pods are the backends, watched by name; its changes apply at once",
    ),
    LlmdFlag(
        "pool-namespace", _WORKS,
        "namespace of the pool and the pods; else the environment variable NAMESPACE, else default",
        own="namespace",
    ),
    LlmdFlag(
        "pool-group", _WORKS,
        "API group of the pool, version v1; `inference.networking.x-k8s.io` is read as v1alpha2",
        default="inference.networking.k8s.io",
    ),
    LlmdFlag(
        "endpoint-selector", _WORKS,
        "selects the pods by label, without a pool; as `--selector`", own="selector",
    ),
    LlmdFlag(
        "endpoint-target-ports", _WORKS,
        "with `--endpoint-selector`: serving ports of these pods, up to 8; each is a backend",
        GO_INTS, own="target_port",
    ),
    LlmdFlag(
        "disable-endpoint-subset-filter", _WORKS,
        "a gateway's list of allowed backends is not followed", GO_BOOL, "false",
    ),
    LlmdFlag(
        "config-file", _WORKS,
        "as `--config`, reloaded when it changes; without it and `--config-text` the predicted cost"
        " chooses, where llm-d weighs queue 2, KV cache 2 and prefix 3", own="config",
    ),
    LlmdFlag("config-text", _WORKS, "the configuration itself", own="config"),
    LlmdFlag(
        FEATURE_GATES, _WORKS,
        "as `featureGates` in the configuration, whose entries of the same gates it overrides:"
        " `flowControl` turns flow control on, and an unknown gate is refused", GO_STRINGS,
    ),
    LlmdFlag("grpc-port", _WORKS, "port of ext_proc; as `--listen`", GO_INT, "9002", own="listen"),
    LlmdFlag(
        "grpc-health-port", _WORKS,
        "port of gRPC's health service, and of `/healthz` and `/readyz`; as `--health`",
        GO_INT, "9003", own="health",
    ),
    LlmdFlag(
        "health-checking", _NOT_NEEDED,
        "ext_proc's port always has gRPC's health service", GO_BOOL, "false",
    ),
    LlmdFlag(
        "metrics-port", _WORKS,
        "port of `/metrics`; as `--metrics`", GO_INT, "9090", own="metrics",
    ),
    LlmdFlag(
        "metrics-endpoint-auth", _WORKS,
        "whether the pages of the metrics port need a token that may read them, by TokenReview and"
        " SubjectAccessReview; without a pool or a selector the default is false", GO_BOOL, "true",
    ),
    LlmdFlag(
        "metrics-cert-dir", _WORKS,
        "directory of tls.crt and tls.key for the metrics port, reloaded when it changes",
    ),
    LlmdFlag(
        "metrics-client-ca-file", _WORKS,
        "with `--metrics-cert-dir`: clients need a certificate of these authorities",
    ),
    LlmdFlag(
        "secure-serving", _WORKS,
        "TLS on ext_proc's port; without a pool or a selector the default is false",
        GO_BOOL, "true", own="tls_dir",
    ),
    LlmdFlag(
        "cert-path", _WORKS,
        "directory of tls.crt and tls.key; as `--tls-dir`. Without it the certificate is"
        " self-signed, made at the start", own="tls_dir",
    ),
    LlmdFlag(
        "enable-cert-reload", _NOT_NEEDED,
        "a changed certificate is always used for new connections", GO_BOOL, "false",
    ),
    LlmdFlag(
        "tls-min-version", _WORKS,
        "`VersionTLS12` or `VersionTLS13`; older ones are raised to 1.2, which HTTP/2 needs",
    ),
    LlmdFlag(
        "tls-cipher-suites", _WORKS,
        "ciphers of TLS 1.2, by Go's names; those that HTTP/2 forbids are refused", GO_STRINGS,
    ),
    LlmdFlag(
        "drain-timeout", _WORKS,
        "time after SIGTERM for which the EPP, no longer ready, still answers; without a pool or a"
        " selector the default is 0s", GO_DURATION, "30s",
    ),
    LlmdFlag(
        "grpc-max-recv-msg-size", _WORKS,
        "raises the limit of a request's body to this size; as `--max-body`, 16 MiB. Messages that"
        " llm-d refuses by its default of 4 MB are accepted", own="max_body",
    ),
    LlmdFlag(
        "grpc-max-send-msg-size", _NO_EFFECT,
        "answers are of a few hundred bytes or have the size of the client's body",
    ),
    LlmdFlag(
        "tracing", _WORKS,
        "whether spans are exported to the collector of OTEL_EXPORTER_OTLP_ENDPOINT; without that"
        " variable none are. By gRPC if the collector's port is 4317 or OTEL_EXPORTER_OTLP_PROTOCOL"
        " says so, else over HTTP", GO_BOOL, "true",
    ),
    LlmdFlag("v", _WORKS, "4 and more: log level debug; else info", GO_INT, "2", own="log_level"),
    LlmdFlag(
        "zap-log-level", _WORKS,
        "debug, info, error, panic, or a number as for `-v`, which it overrules", own="log_level",
    ),
    LlmdFlag("zap-encoder", _WORKS, "`json`: a line of the log is a JSON object"),
    LlmdFlag("zap-devel", _NO_EFFECT, "the log has one style", GO_BOOL, "true"),
    LlmdFlag("zap-stacktrace-level", _NO_EFFECT, "unexpected errors always have a traceback"),
    LlmdFlag("zap-time-encoding", _NO_EFFECT, "times of the log are in ISO 8601"),
    LlmdFlag(
        "ha-enable-leader-election", _NO_EFFECT,
        "every replica serves; `--peers` shares what they know", GO_BOOL, "false",
    ),
    LlmdFlag(
        "emit-endpoint-scores", _NO_EFFECT,
        "scores are not in the metadata, but on `/debug/decisions`", GO_BOOL, "false",
    ),
    LlmdFlag(
        "enable-grpc-stream-metrics", _NO_EFFECT,
        "`tandem_epp_in_flight` and `tandem_epp_outcomes_total` count streams", GO_BOOL, "false",
    ),
    LlmdFlag(
        "refresh-metrics-interval", _NO_EFFECT,
        "engines are scraped fast under load and slowly at rest", GO_DURATION, "50ms",
    ),
    LlmdFlag(
        "refresh-prometheus-metrics-interval", _NO_EFFECT,
        "metrics are computed when they are read", GO_DURATION, "5s",
    ),
    LlmdFlag(
        "metrics-staleness-threshold", _NO_EFFECT,
        "figures of engines count less the older they are", GO_DURATION, "2s",
    ),
    LlmdFlag(
        "plugin-state-staleness-threshold", _NO_EFFECT,
        "a request counts until its stream ends, however long it runs", GO_DURATION, "5m",
    ),
    LlmdFlag(
        "fairness-id-metric-label-limit", _NO_EFFECT,
        "the label `fairness_id` has one value", GO_INT, "1000",
    ),
    LlmdFlag("enable-pprof", _NO_EFFECT, "there are no profiles of Go", GO_BOOL, "true"),
    LlmdFlag(
        "allow-experimental-plugins", _NO_EFFECT,
        "every plugin that works may be named", GO_BOOL, "false",
    ),
    LlmdFlag("total-queued-requests-metric", _REFUSED, _ENGINES),
    LlmdFlag("total-running-requests-metric", _REFUSED, _ENGINES),
    LlmdFlag("kv-cache-usage-percentage-metric", _REFUSED, _ENGINES),
    LlmdFlag("lora-info-metric", _REFUSED, _ENGINES),
    LlmdFlag("cache-info-metric", _REFUSED, _ENGINES),
)  # fmt: skip

BY_NAME: Final[Mapping[str, LlmdFlag]] = {flag.name: flag for flag in FLAGS}
