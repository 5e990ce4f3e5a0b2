"""The reference engine: a Llama-family model in torch, served under vLLM's names.

    HTTP      requests, stop strings, detokenizing   `server`, `protocol`, `answers`, `text`
    loop      schedule a step, run it, deliver       `engine`, `scheduler`, `blocks` (no torch)
    math      batched forward pass over paged KV     `runner`, `model`, `cache`, `sampler`
    hand-off  hold, pull and release KV blocks       `prompt_holds`, `remote_prefills`, `transfer/`

It serves where there is no GPU and no vLLM, and tests use it as a second real implementation of
vLLM's protocols. Routing, retries and Kubernetes do not belong here. Start with `types`, then
`engine`.
"""
