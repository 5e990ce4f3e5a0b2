"""Checks a running set of engines and sidecars, and reports findings with their fixes.

    cluster_pods, local_pods   the pods to check: of a cluster's namespace, of this machine's stack
    router_pods                the backends of a tandem-router
    gather                     asks engines and sidecars; the answers become `facts`
    checks                     facts → findings (pure); `compatibility` compares pairs of engines
    lmcache                    what both sides must agree on with LMCache, and what it finds
    storage_use                how engines get on with their external store; the test of a store
    keys                       whether the pods of a set prove themselves to each other
    data_ports                 the ports at which UCX takes connections
    estimates                  what the EPPs estimate of their pods, and how old that is
    findings                   a finding: severity, check, subject, detail, fix
    engine_command             an engine's command line → flags and KV transfer configuration
    side_channel               the port at which a reader's KV handshake begins
    processes, gpus            what /proc and NVML tell of engines and GPUs of this machine
    pod_http                   GET of a pod's endpoints, directly or through the API server

This package changes nothing that it looks at, and it does not print: that is the CLI's part.
Read `checks` first.
"""
