"""The custom resources: from YAML or API objects to typed pools, every choice made. Pure.

    schema, cel, objects, canonical     the CRD's defaults, structure and rules, on one object
    inherit, agree, versions, words     what pools of a set share, must agree on, and a vLLM has
    resolve, spec, members, pools       the result as types, grouped into sets

Read `pools` first.
"""
