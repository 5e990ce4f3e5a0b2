"""A small Kubernetes API client on plain JSON for the operator, the EPP and the command line.

    client       connect, get, list, create, apply, patch, delete, watch
    errors       the errors of a call, by what the caller can do about them
    resources    API paths of the kinds that Tandem uses
    transport    one authenticated HTTP request and its response
    reflector    a list kept current by a watch that resumes, as in client-go
    events       Kubernetes events about an object
    pages        the HTTP pages that the kubelet and Prometheus read: health and metrics

Objects are dicts as the API server sends them; callers parse them into types themselves. There is
no policy here and nothing about Tandem's own resources. Read `client` first.
"""
