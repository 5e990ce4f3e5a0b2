"""Decides, for one routing endpoint, which objects to write and what its DecodePools report. Pure.

    observed        what the operator sees of an endpoint, and the plan that results
    settings        what all endpoints share: the operator's flags and the router settings file
    requirements    the settings of several DecodePools combined, and where they conflict
    front           whether Envoy with the EPP, or the router, serves, and how one follows the other
    plan            plan_endpoint and router_state, made from all of these

Manifests themselves are built in `routing.objects`. Read `plan` first.
"""
