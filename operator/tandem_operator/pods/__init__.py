"""From a pool to the template of its pods. Pure.

    manifests     pool → Pod JSON: labels, placement, volumes; `merge` applies the user's template
    containers    the engine and the sidecar: ports, probes, flags, security contexts
    engines       the engine's command line, variables and volumes
    models        the engine's --model, and where a volume with the model is mounted
    connectors    --kv-transfer-config and what belongs to it
    probes        Kubernetes' probes, as `healthChecks` says
    startup       startupProbe of engine, sidecar and EPP; its source text is part of the pod
    prestop       preStop of a vLLM prefill engine; its source text is part of the pod
    drain_hook    preStop of a decode engine; its source text is part of the pod

Read `manifests` first, then `engines`.
"""
