"""The sidecar between real vLLM engines (docs/run/vllm.md); run by `make test-vllm`.

`engines` starts vLLM with the command line that the operator renders, `pairs` runs two engines and
a sidecar, `api_requests` is the client.
"""
