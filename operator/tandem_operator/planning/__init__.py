"""From what is seen of a set to what is written and said about it. Pure.

    parse, reading                          API objects → observed values and typed pools
    plan, revisions, coherence, rollout, replacement, pod_plan, budgets, progress    what to write
    status, status_facts, status_conditions, transitions, fit                        what to say
    covers                                  whether a live object is as desired already

Read `plan` first, then `status`.
"""
