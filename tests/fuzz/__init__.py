"""Coverage-guided fuzzing of everything that reads bytes of a client, a pod or a store.

    make fuzz                              all targets, an hour
    make fuzz ARGS="--seconds 60 plan"     one target, a minute

A target (`targets/`) is a function that gets any bytes and asserts what must hold for them; `main`
runs each with libFuzzer in a process of its own (`process`). `corpus/TARGET/` has its first inputs.
An input that fails is written there as `crash-…`; commit it with the mend: `test_corpus` runs every
file of the corpus in `make test`.
"""
