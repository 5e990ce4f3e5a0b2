"""The choice: which pods serve a request, and whether it is split between two of them.

    cost_choice       by the predicted cost in seconds; the default, and what the product is about
    scheduler         asks it, or what the configuration puts in its place, and falls back
    routing           what of the configuration a choice depends on
    candidate_layout  the pods of a model, and which two of them can exchange KV
    context           what the pods have of one prompt; `prompt_tokens`: of all pods at once

What the cost is, term by term, is in `tandem_planner.cost`. llm-d's filters and scorers choose
instead where a configuration lists one: `llmd.plugins`.

Not here: I/O, a clock, or changes to the pods' state. Read `cost_choice` first.

Errors: `result.NoBackend`, `result.SplitImpossible`.
"""
