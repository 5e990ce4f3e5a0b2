"""Versions of the programs built for the tests; `make cluster-tools` rebuilds after a change."""

KUBERNETES = "1.36.3"
CONTAINERD = "2.4.2"
COREDNS = "1.15.0"
HELM = "3.22.0"
KWOK = "0.8.0"
# The newest version that the Go module proxy serves.
KUBE_ROUTER = "2.1.0"
TOXIPROXY = "2.5.0"
VERSITYGW = "1.8.0"
H2SPEC = "2.2.1"
GATEWAY_API = "1.6.1"
INFERENCE_EXTENSION = "1.6.0"
# Istio's tags are no module versions: the commit of 1.31's branch that the Go module proxy serves.
ISTIO = "0.0.0-20260827124520-eed52ebb66ad"
ENVOY_GATEWAY = "1.9.1"
