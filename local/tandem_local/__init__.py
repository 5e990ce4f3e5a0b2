"""Runs Pod JSON as processes on one machine: the same Pods that the operator creates on Kubernetes.

    stack           pods, EPP and Envoy together, with a progress display
    runner          pods: addresses, volumes, readiness, shutdown
    pod             one pod: start order, stop order, replacement
    container       one container: its process, probes, handlers and restarts
    process         a command that cannot outlive this process; `init` is its parent
    pod_fields      the Pod fields that the runner honours, ignores or refuses
    pod_parser      Pod JSON → the types of `pod_spec`; addresses, variables and mounts resolved
    host            what this machine gives a container: command, environment, GPUs
    addresses       one 127.x.y.z for each pod
    router          EPP and Envoy as pods
    pool_files      the YAML files given with -f
    state           the run directory: how other terminals find the stack
    stack_metrics   load of a running stack, from its metrics pages

Read `stack` first. Errors are in `errors`.
"""
