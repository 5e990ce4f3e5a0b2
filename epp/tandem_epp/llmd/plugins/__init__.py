"""llm-d's plugins: a choice by filters and scorers, for configurations that list one.

A profile chooses pods for one phase: filters rule candidates out, scorers rate those that are left,
a picker draws from them. The decider says whether the request is split between two pods at all.
Each filter, scorer and picker is one small class; `registry` has one entry for each, under llm-d's
names, and `config` reads from the configuration which of them run. A few plugins remember where
requests went (`plugin_types.PlacementLearner`); all state of pods is elsewhere.

Not here: I/O, a clock, or changes to the pods' state. Read `score_choice` first; to add a plugin,
`registry`.
"""
