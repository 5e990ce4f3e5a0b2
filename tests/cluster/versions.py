"""Versions of the programs built for the tests; `make cluster-tools` rebuilds after a change."""

KUBERNETES = "1.36.3"
CONTAINERD = "2.4.2"
COREDNS = "1.15.0"
HELM = "3.22.0"
KWOK = "0.8.0"
TOXIPROXY = "2.5.0"
H2SPEC = "2.2.1"
