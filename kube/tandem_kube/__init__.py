"""The Kubernetes API as plain JSON: what the operator, the EPP and the command line share.

    client       connect, get, list, create, apply, patch, delete, watch
    errors       what can go wrong, by what a caller can do about it
    resources    where the API keeps each kind
    transport    one HTTP exchange
    reflector    a list kept current by a watch that resumes
    pages        what the kubelet and Prometheus ask of a process: health and metrics

Objects are dicts as the API server sends them; whoever needs types parses them at its own edge.
No policy, no Tandem names: nothing here knows what a pool is. Read `client` first.
"""
