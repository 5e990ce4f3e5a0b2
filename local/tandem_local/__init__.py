"""Runs Pod JSON as processes on one machine: what the operator would give Kubernetes, exactly.

    fields      which Pod fields are honoured, ignored, refused: one table
    podparse    Pod JSON → podspec's types, with addresses, variables and mount paths resolved
    addresses   one 127.x.y.z for each pod
    machine     what an image is here: a command, an environment, GPUs
    process     a command that cannot outlive this process, under init
    container   one container: its process, its probes, its restarts
    pod         one pod: the order of start and stop, its replacement
    runner      pods: addresses, volumes, readiness of all
    sources     the files that -f names
    router      EPP and Envoy as pods
    stack       pods, EPP and Envoy together, with a progress display
    state       the run directory: how another terminal finds the stack
    observe     what a running stack is doing

Read `stack` first. Errors are in `errors`.
"""
