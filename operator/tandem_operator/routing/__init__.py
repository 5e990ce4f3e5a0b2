"""Turns the DecodePools behind a routing endpoint into its Kubernetes objects and Envoy bootstrap.

    endpoint        ObservedEndpoint → EndpointPlan (objects to write), RouterState (status)
    objects         the manifests: Deployments, Services, ConfigMaps, RBAC, InferencePool, HTTPRoute
    envoy           Envoy's bootstrap configuration; the local runner uses it too
    router_drain    a program that runs beside Envoy and drains it on SIGTERM

Pure, except `router_drain`. Envoy's Deployment names that module on its command line, so it cannot
move without a rollout of every Envoy. Read `endpoint.plan` first.
"""
