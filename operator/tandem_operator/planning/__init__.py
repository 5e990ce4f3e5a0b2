"""From what the operator observes of a set to what it writes and reports. Pure.

    api_objects, validation            API objects → observed values → pools, or their rejection
    plan, actions                      what to write: one pass over a set
    revisions, revision_gate, rollout, pod_plan, budgets, progress        the steps of a plan
    status, status_facts, status_conditions, node_fit                     what to report
    key_rotation                       keys that pods prove themselves with, and when they change
    drift                              whether a live object is as desired already

Read `plan` first, then `status`.
"""
