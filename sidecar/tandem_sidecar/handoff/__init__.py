"""Serves one request: refuses it, hands it off to a prefill and a decode engine, or forwards it.

Every request enters at `proxy`. A hand-off is decided by `machine`, a pure state machine over the
events and actions of `events_actions`. `driver` performs its actions over real connections, with
`prefilling` for the prefill attempts and `decoding` for the decode leg; `classify` turns engines'
answers into events. `forward` serves requests without a hand-off. `context` is what all requests of
a process share, `liveness` and `breaker` watch the engines, `outbound` writes requests to engines
and releases, and `reply` writes the sidecar's headers and errors.

Read `machine` first, then `driver`.
"""
