"""Serves one request: refuses it, hands it off to a prefill and a decode engine, or forwards it.

Every request enters at `proxy`, and `generation` starts it once its engine is chosen. A hand-off is
decided by `machine`, a pure state machine over the events and actions of `events_actions`. `driver`
performs its actions over real connections, with `prefilling` for the prefill attempts and
`decoding` for the decode leg; `classify` turns engines' answers into events. Without a hand-off,
`forward` serves generations, `passthrough` what generates nothing, and `proven_prefill` the prefill
leg of another pod's hand-off. `context` is what all requests of a process share, `liveness`,
`transfer_monitor` and `breaker` watch the engines, `outbound` writes requests to engines and
releases, `reply` writes the sidecar's headers and errors, and `timing` what they tell a router.

Read `machine` first, then `driver`.
"""
