"""The custom resources: from YAML or API objects to typed pools, every choice made. Pure.

    schema, cel                        one object against its CRD: defaults, structure, rules
    compatibility                      what pools of a set inherit and must agree on
    vllm_versions                      which vLLM has what, and settings that a version lacks
    resolve, spec, pools               specs with every choice made, as types
    pool_files                         pools from YAML files

Read `pools` first. To add a field: the CRD, then `spec`, then the module that renders it.
"""
