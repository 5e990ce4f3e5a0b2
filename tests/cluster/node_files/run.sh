#!/bin/sh
# First process of the node: it has its own process, mount and network namespaces, so the host sees no
# mount made here, and the kernel ends all of the node's processes with this one.
# Environment: STATE, a folder for the node's files; BIN, the folder of programs; NODE; NODE_IP.
set -eu
mount --make-rshared /
# Hide the host's /run: its containerd socket and network namespaces must not be used here.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/containerd /run/lock /run/cni-ipam /run/state
mount --bind "$STATE" /run/state
# Overlays over /var and /opt: programs create folders there, which must not reach the host.
for top in var opt; do
  mkdir -p "/run/state/over/$top" "/run/state/scratch/$top"
  mount -t overlay -o "lowerdir=/$top,upperdir=/run/state/over/$top,workdir=/run/state/scratch/$top" node "/$top"
done
# containerd mounts overlays, which cannot be placed on an overlay: bind-mount a plain folder.
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
# A first process must reap orphaned children.
while :; do wait; sleep 1; done
