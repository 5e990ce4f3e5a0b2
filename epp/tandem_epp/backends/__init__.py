"""The backends: which there are, and how loaded and healthy they are.

`pods` is one backend, `fleet` all of them, and `pairing` says which two may serve a request
together. `fleet_figures` has what requests are predicted to take on each. Discovery fills the
fleet: from the configuration file (`tandem_epp.process.configuration`) or from a cluster's pods
(`kubernetes_discovery`, with `pod_backend` reading one pod; for those of an InferencePool
`pool_discovery`, with `inference_pool` reading the pool). `members` makes each data-parallel
rank of a backend a pod. `scrape` keeps load and health current, at the pace of `pace`:
`page_client` requests the pages, and `page_reader` reads them. `precise` asks the precise index for
a prompt. `warmup` has each prefill/decode pair make its first hand-off early, by `warmup_requests`.
`outcomes` says what an answer tells of its pods, `stores` which external store each loads from.
Choosing among backends belongs to `choice`.
Read `pods` first.
"""
