"""The reference engine: a Llama-family model in torch, served under vLLM's names.

    HTTP  server → prompts, stops, detokenizing      `server`, `protocol`, `text`
    loop  engine → schedule a step, run it, deliver  `engine`, `scheduler`, `blocks` (no torch)
    math  runner → batched forward over paged KV     `runner`, `model`, `cache`, `sampler`
    wire  transfer → hold, pull, release KV blocks   `transfer/`

It is the embedded default where no GPU and no vLLM is at hand, and a second real peer for every
protocol test. Never here: routing, retries, Kubernetes. Start with `types`, then `engine`.
"""
