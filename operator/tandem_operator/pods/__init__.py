"""From a pool to the template of its pods: containers, command lines, what goes with them. Pure.

Read `manifests` first, then `engines`.
"""
