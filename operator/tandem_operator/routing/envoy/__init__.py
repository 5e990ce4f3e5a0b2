"""Envoy's bootstrap configuration, rendered for the operator's ConfigMap and for the local runner.

    bootstrap       EnvoySettings, envoy_bootstrap, listeners, the overload manager
    http_filters    filters, routes and error replies of the clients' listener
    clusters        upstream clusters: picked pod, any decode pod, EPP, admin port

Pure: returns JSON-like dicts, reads nothing. Read `bootstrap` first.
"""
