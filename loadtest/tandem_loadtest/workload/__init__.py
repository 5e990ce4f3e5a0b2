"""What is sent and when; pure. Everything follows from a seed.

`sessions` has the values: a `Session` of one or more `Turn`s, whose prompts are `Segment`s of
stated lengths. `settings` says what a run asks for, `arrivals` computes start times, `presets`
builds sessions, `schedule` gives sessions their start times, `traces` and `sharegpt` read files,
`prompts` turns segments into token ids or text (`text`) of an exact number of tokens (`tokenizer`),
or of as many as `calibration` tells. `conversations` is the fixed workload of `tandem demo`.

Read `sessions` first, then `schedule`.
"""
