"""How each KV connector's two legs are written, one file per connector.

The Protocol they satisfy is declared where it is used: `tandem_sidecar.exchange.Connector`.
"""
