"""Failures of real processes: killed, suspended, disconnected, or with corrupted responses.

| failure | tested in |
|---|---|
| prefill refuses connections | `test_killed.py` |
| prefill answers 5xx, or hangs | `tests/sidecar/real/test_prefill.py` |
| prefill is too slow | `test_network.py` |
| prefill answers 4xx, 429, 503 | `tests/sidecar/real/test_prefill.py` |
| kv_transfer_params unusable, or of another request | `tests/sidecar/real/test_params.py` |
| KV load fails | `test_killed.py`, `test_network.py`, `tests/sidecar/real/test_params.py` |
| client disconnects | `tests/sidecar/real/test_disconnects.py` |
| decode engine dies, or hangs | `test_killed.py`; `tests/sidecar/real/test_decode.py` |
| drain | `tests/sidecar/real/test_drain.py` |
| all of it at once | `test_load.py` |
| engines of streams that can be resumed die all the time | `test_streams.py` |

Tests of a second or two are in `tests/sidecar/real` and run with `make test`; `make chaos` runs the
rest. Responses are float64 and greedy, and compared token by token.
"""
