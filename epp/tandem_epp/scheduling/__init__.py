"""Scheduling: which backend a request goes to, and whether it is split.

A profile chooses backends for one phase: filters rule candidates out, scorers rate those that are
left, a picker draws from them. The decider says whether the request is split between two backends
at all. Each filter, scorer and picker is one small class; `registry` has one entry for each, under
llm-d's names, and `config` reads from the configuration file which of them run. A few plugins
remember where requests went (`config.PlacementLearner`); all state of backends is elsewhere.

Not here: I/O, a clock, or changes to the backends' state. Read `scheduler` first; to add a
plugin, `registry`.
"""
