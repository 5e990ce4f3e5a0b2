"""From the pools behind an endpoint to its Service, picker, Envoy and keys. Pure, but for
`router_drain`, the small program beside Envoy.

Read `router` first; `envoy` holds Envoy's bootstrap.
"""
