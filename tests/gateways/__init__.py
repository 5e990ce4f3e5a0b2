"""Tandem's endpoint picker behind gateways of the Gateway API Inference Extension.

istio.py             Istio's control plane and a gateway's Envoy, as processes
site.py              pods, their engines and the EPP, on addresses of their own
test_istio.py        requests through Istio, from the manifests in examples/gateways
test_manifests.py    these manifests on a real API server, with the gateways' own definitions
test_conformance.py  the Inference Extension's conformance suite on the node, with Istio and our EPP
conformance.py       the suite, and what Istio in a whole cluster would create itself
test_envoy_gateway.py  Envoy Gateway's controller and Envoy on the node, and our EPP
test_contract.py     Envoy configured as each gateway configures it
"""
