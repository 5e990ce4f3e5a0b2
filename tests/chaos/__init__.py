"""What DESIGN's failure table says, done to real processes: killed, stopped, cut off, lied about.

| row | where |
|---|---|
| prefill refuses | `test_killed.py` |
| prefill answers 5xx, or hangs | `tests/sidecar/real/test_prefill.py` |
| prefill is too slow | `test_network.py` |
| prefill says 4xx, 429, 503 | `tests/sidecar/real/test_prefill.py` |
| no usable params, or another's | `tests/sidecar/real/test_params.py` |
| KV load fails | `test_killed.py`, `test_network.py`, `tests/sidecar/real/test_params.py` |
| client goes away | `tests/sidecar/real/test_leaving.py` |
| decode engine dies, or hangs | `test_killed.py`; `tests/sidecar/real/test_decode.py` |
| drain | `tests/sidecar/real/test_drain.py` |
| all of it at once | `test_load.py` |

What takes a second or two is in `tests/sidecar/real`, hence in `make test`; `make chaos` runs the
rest. Answers are float64 and greedy, and compared token for token.
"""
