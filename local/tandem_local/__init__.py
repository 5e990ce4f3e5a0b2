"""Runs Pod JSON as processes on one machine: what the operator would give Kubernetes, exactly.

    fields      which Pod fields are honoured, ignored, refused: one table
    podspec     Pod JSON → types, with addresses, variables and mount paths resolved
    addresses   one 127.x.y.z for each pod
    container   one container: its process, its probes, its restarts
    runner      pods: order of start and stop, readiness
    stack       pods, EPP and Envoy together, with a progress display
    state       the run directory: what `tandem status` reads

Read `stack` first. Errors are in `errors`.
"""
