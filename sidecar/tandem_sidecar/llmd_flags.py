"""The flags of llm-d's sidecar (pd-sidecar of llm-d-router), and older names of them.

Source: llm-d/llm-d-router v0.10.0 and its main branch after it (commit 0186107de07d),
pkg/sidecar/proxy/options.go.

`FLAGS` is the table: what each flag does here. `llmd_command` has click parse them.
"""

from typing import Final

from tandem_contract.go_flags import GO_BOOL, GO_DURATION, GO_INT, GO_STRINGS
from tandem_contract.llmd_flags import LlmdFlag, Treatment

WORKS, NO_EFFECT, REFUSED = Treatment.WORKS, Treatment.NO_EFFECT, Treatment.REFUSED

_MORIIO: Final = "vLLM's MoRI-IO connector is not supported: use `--kv-connector=nixlv2`"
_FOR_SSRF: Final = "the pool is only needed for `--enable-ssrf-protection`"
_OLD: Final = "older name of "

FLAGS: Final = (
    LlmdFlag("port", WORKS, "port of `--listen`, on all addresses of the pod", GO_INT),
    LlmdFlag("model-server-port", WORKS, "port of `--engine`, on loopback", GO_INT),
    LlmdFlag("vllm-port", WORKS, f"{_OLD}`--model-server-port`", GO_INT),
    LlmdFlag(
        "data-parallel-size", WORKS,
        "serves as many ports, from `--port` on, and passes each to the engine's port of the same"
        " rank; readiness and counters are those of rank 0", GO_INT,
    ),
    LlmdFlag(
        "kv-connector", WORKS,
        "`--connector`: `nixlv2` is nixl here, `mooncake` and `offloading` have the same name;"
        " `shared-storage` and `sglang` are refused: KV moves only between vLLM's engines, from one"
        " to the other or through LMCache (`lmcache`, `lmcache-mp`)",
    ),
    LlmdFlag(
        "ec-connector", REFUSED,
        "no pods of their own encode media: leave it out, and the pod that prefills encodes",
        off=("",),
    ),
    LlmdFlag(
        "mooncake-bootstrap-port", WORKS, "`--peer-port` with mooncake; else without effect",
        GO_INT, environment="MOONCAKE_BOOTSTRAP_PORT",
    ),
    LlmdFlag(
        "p2p-connector-port", WORKS, "`--peer-port` with offloading; else without effect",
        GO_INT, environment="P2P_CONNECTOR_PORT",
    ),
    LlmdFlag(
        "enable-p2p-pull", NO_EFFECT,
        "no prompt is pulled from a third pod: the pod that prefills computes it",
        GO_BOOL, off=(False,),
    ),
    LlmdFlag(
        "enable-ssrf-protection", WORKS,
        "needs `--plan-key-dir` or `--prefill-allow`, which name the prefill pods that count, and"
        " is refused without: the sidecar does not ask the API server for the pods of a pool",
        GO_BOOL,
    ),
    LlmdFlag("inference-pool", NO_EFFECT, _FOR_SSRF, environment="INFERENCE_POOL"),
    LlmdFlag("inference-pool-namespace", NO_EFFECT, _FOR_SSRF),
    LlmdFlag("inference-pool-name", NO_EFFECT, _FOR_SSRF),
    LlmdFlag("pool-group", NO_EFFECT, _FOR_SSRF),
    LlmdFlag(
        "enable-prefiller-sampling", WORKS,
        "tries the prefill pods of an unsigned header in random order", GO_BOOL,
        environment="ENABLE_PREFILLER_SAMPLING",
    ),
    LlmdFlag(
        "decode-chunk-size", NO_EFFECT, "one request to the engine generates the whole answer",
        GO_INT, off=(0,),
    ),
    LlmdFlag(
        "tracing", WORKS,
        "sends spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, by gRPC if its port"
        " is 4317", GO_BOOL,
    ),
    LlmdFlag(
        "metrics-port", WORKS, "port of `--admin`, which also serves /metrics; 0: 8001", GO_INT,
    ),
    LlmdFlag(
        "enable-tls", WORKS,
        "`prefiller`: `--prefill-tls`; `decoder`: `https` in `--engine`; `encoder`: without effect",
        GO_STRINGS,
    ),
    LlmdFlag(
        "tls-insecure-skip-verify", WORKS,
        "`prefiller`, `decoder`: accepts any certificate; `encoder`: without effect",
        GO_STRINGS,
    ),
    LlmdFlag(
        "max-idle-conns-per-host", NO_EFFECT,
        "256 idle connections are kept for each engine, and more are opened at need", GO_INT,
    ),
    LlmdFlag(
        "prefill-max-retries", WORKS,
        "`--retries`: the other prefill pods of the header are tried, where llm-d tries the same"
        " pod again; without the flag 2, not 0", GO_INT,
    ),
    LlmdFlag(
        "prefill-retry-backoff", NO_EFFECT, "another prefill pod is tried at once", GO_DURATION
    ),
    LlmdFlag("configuration", WORKS, "YAML of flags' names and values, in the command line"),
    LlmdFlag(
        "configuration-file", WORKS, "`--config`: the same in a file, followed when it changes",
    ),
    LlmdFlag(
        "zap-log-level", WORKS,
        "`--log-level`: `debug` and numbers from 4 on are debug, smaller numbers info, `panic` is"
        " error",
    ),
    LlmdFlag("v", WORKS, "as `--zap-log-level` with a number", GO_INT),
    LlmdFlag("zap-encoder", WORKS, "`--log-format`: `json`, or `console` for text"),
    LlmdFlag("zap-devel", WORKS, "`--log-level debug`", GO_BOOL),
    LlmdFlag("zap-stacktrace-level", NO_EFFECT, "only unexpected errors have a traceback"),
    LlmdFlag("zap-time-encoding", NO_EFFECT, "times are in RFC 3339's format"),
    LlmdFlag("connector", WORKS, f"{_OLD}`--kv-connector`, with the names of both"),
    LlmdFlag("prefiller-use-tls", WORKS, f"{_OLD}`--enable-tls=prefiller`", GO_BOOL),
    LlmdFlag("decoder-use-tls", WORKS, f"{_OLD}`--enable-tls=decoder`", GO_BOOL),
    LlmdFlag(
        "prefiller-tls-insecure-skip-verify", WORKS,
        f"{_OLD}`--tls-insecure-skip-verify=prefiller`", GO_BOOL,
    ),
    LlmdFlag(
        "decoder-tls-insecure-skip-verify", WORKS,
        f"{_OLD}`--tls-insecure-skip-verify=decoder`", GO_BOOL,
    ),
    LlmdFlag(
        "secure-serving", WORKS,
        "clients connect over TLS 1.2 or newer; the default with any flag of this table", GO_BOOL,
    ),
    LlmdFlag("secure-proxy", WORKS, f"{_OLD}`--secure-serving`", GO_BOOL),
    LlmdFlag(
        "cert-path", WORKS,
        "directory of tls.crt and tls.key, read again when they change; without it a self-signed"
        " certificate",
    ),
    LlmdFlag(
        "tls-min-version", WORKS,
        "`VersionTLS12` or `VersionTLS13`: oldest version of TLS that clients may use",
    ),
    LlmdFlag(
        "tls-cipher-suites", WORKS,
        "ciphers of TLS 1.2 for clients, by the names of Go that it does not call insecure; those"
        " of TLS 1.3 are always on", GO_STRINGS,
    ),
    LlmdFlag(
        "metrics-cert-dir", REFUSED,
        "the admin port, which serves /metrics, has no TLS: leave it out, and let a NetworkPolicy"
        " limit who reaches the port", off=("",),
    ),
    LlmdFlag(
        "enable-speculative-prefill", NO_EFFECT,
        "no prompt is computed before a client sends it", GO_BOOL, off=(False,),
    ),
    *(
        LlmdFlag(f"moriio-{name}", REFUSED, _MORIIO, GO_BOOL, off=(False,))
        for name in ("write-mode", "parallel-dispatch")
    ),
    LlmdFlag("moriio-dp-size", REFUSED, _MORIIO, GO_INT, off=(1,)),
    *(
        LlmdFlag(f"moriio-{name}", NO_EFFECT, "needs `--moriio-write-mode`")
        for name in (
            "decode-notify-port", "local-pod-ip", "decode-handshake-port",
            "parallel-decode-wait-timeout", "prefill-handshake-port", "prefill-notify-port",
            "tp-size", "remote-hosts", "dp-size-local", "decode-hosts",
        )
    ),
)  # fmt: skip
"""Every flag, in the order of llm-d's help."""

OURS: Final = frozenset({"connector", "configuration", "configuration-file"})
"""Flags that are no option of their own: `--connector` is Tandem's, too, and the others set
values of other flags before those are read."""
