"""The manifests of an endpoint's Kubernetes objects. Pure.

    common    names, labels and owners; Service, ConfigMap, Deployment, PodDisruptionBudget, …
    envoy     the Service that clients connect to; Envoy's Deployment and its ConfigMap
    policies  NetworkPolicies: who may connect to the endpoint's pods
    epp       the EPP's Deployment, ConfigMap and RBAC; InferencePool and HTTPRoute
    router    the router's Deployment and ConfigMap, where it is the front instead of both

To add an object: build it here with `common.body` and yield it in `endpoint.plan`. For a new kind,
also list it in `tandem_kube.resources.KINDS` and in `endpoint.observed.CHILD_KINDS`, so that it is
watched and deleted again, and permit it in the chart's `templates/_rules.tpl`.
"""
