"""The manifests of an endpoint's Kubernetes objects. Pure.

    common    names, labels and owners; Service, ConfigMap, Deployment, PodDisruptionBudget, …
    envoy     Envoy's Deployment, its ConfigMap and the Services that clients connect to
    policies  NetworkPolicies: who may connect to the endpoint's pods
    epp       the EPP's Deployment, ConfigMap and RBAC; InferencePool and HTTPRoute

To add an object: build it here with `common.body` and yield it in `endpoint.plan`. For a new kind,
also list it in `tandem_kube.resources.KINDS` and in `endpoint.observed.CHILD_KINDS`, so that it is
watched and deleted again, and permit it in the chart's `templates/_rules.tpl`.
"""
