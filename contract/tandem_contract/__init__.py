"""What two Tandem components must agree on, each thing once.

Here belong the names on the wire (`headers`, `labels`, `ports`, `metrics`), the routing paths,
`kv_transfer_params` as types, the prefix hash chain, the router's configuration types, the signed
plan, and the conventions every command shares (durations, YAML with line numbers, error bodies,
command-line options). Never: a decision, a socket, a clock. This package imports nothing of ours.

Read `headers` first, then `kvparams`.
"""
