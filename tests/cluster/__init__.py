"""A real Kubernetes for the tests, in two sizes, from Go's module proxy and Debian's packages.

- `control_plane`: etcd, kube-apiserver and kube-controller-manager on loopback ports, their data in
  a temporary folder. Starts in a few seconds without root. It has no node, so no pod runs.
- `node`: also containerd, kubelet, kube-proxy and DNS in network, mount and process namespaces of
  their own. Pods run. Needs root.

`versions` pins the programs' versions, `tools` finds or builds them, `fixtures` defines the pytest
fixtures; docs/project/testing.md is the guide. The product does not import this package.
"""
