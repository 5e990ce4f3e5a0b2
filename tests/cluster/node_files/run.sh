#!/bin/sh
# The node: first process of its process namespace, in mount and network namespaces of its own.
# Environment: STATE, a folder of its own; BIN, where the programs are. The host sees none of the
# mounts made here, and all of it ends with this process.
set -eu
mount --make-rshared /
# What the host's own containerd and netns keep in /run is not for the node to see.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/containerd /run/lock /run/cni-ipam /run/state
mount --bind "$STATE" /run/state
# Written here, it does not reach the host: programs make folders in places of their own choice.
for top in var opt; do
  mkdir -p "/run/state/over/$top" "/run/state/scratch/$top"
  mount -t overlay -o "lowerdir=/$top,upperdir=/run/state/over/$top,workdir=/run/state/scratch/$top" node "/$top"
done
# On a disk of its own nature: containerd mounts overlays, which cannot lie on one.
for part in containerd kubelet; do
  mkdir -p "/var/lib/$part"
  mount --bind "/run/state/$part" "/var/lib/$part"
done
mount --make-rshared /var/lib/kubelet
hostname "$NODE"
sysctl -qw net.ipv4.ip_forward=1
sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
ulimit -n 1048576 2>/dev/null || true
PATH="$BIN:$PATH"
log="$STATE/log"

containerd --config "$STATE/containerd.toml" > "$log/containerd.log" 2>&1 &
until ctr version > /dev/null 2>&1; do sleep 0.1; done
for image in "$STATE"/images/*.tar; do ctr -n k8s.io images import "$image"; done > "$log/import.log" 2>&1
kubelet --config="$STATE/kubelet.json" --kubeconfig="$STATE/kubelet.kubeconfig" \
  --hostname-override="$NODE" --node-ip="$NODE_IP" > "$log/kubelet.log" 2>&1 &
kube-proxy --config="$STATE/kube-proxy.json" > "$log/kube-proxy.log" 2>&1 &
# As first process it reaps what others leave.
while :; do wait; sleep 1; done
