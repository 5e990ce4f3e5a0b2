"""The sidecar between real vLLM engines (docs/vllm.md); run by `make test-vllm`.

`engines` starts vLLM as the operator renders it, `pairs` puts a sidecar between two of them,
`asking` is the client.
"""
