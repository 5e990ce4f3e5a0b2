"""A real Kubernetes for the tests, in two sizes, from Go's module proxy and Debian's packages.

- Control plane: etcd, kube-apiserver, kube-controller-manager on loopback ports in a temporary
  folder. Two seconds to start; no root, no node, no pod ever runs. `control_plane`.
- Node: the whole thing in network, mount and process namespaces of its own, with containerd,
  kubelet, kube-proxy and DNS: pods run. Needs root. `node`.

`versions` pins what is built, `tools` finds or builds it, `fixtures` is what tests use;
docs/testing.md is for people. Nothing here is part of the product, and nothing imports it.
"""
