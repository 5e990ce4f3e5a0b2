"""Tandem's EPP before llm-d's sidecar, and llm-d's EPP before Tandem's sidecar.

`test_headers` holds the headers between them, and always runs. `test_with_llmd` runs llm-d's own
programs, where `$TANDEM_LLMD_BIN` names a folder that has them: `pd-sidecar` and `epp`, built from
llm-d-router (0.10 or newer). This repository neither contains nor builds them.
"""
