"""The flags of llm-d-router's EPP, beside this EPP's own.

`flags` is the table of all of them and of what becomes of each; `options` has click accept them;
`values` turns those given into `Settings`; `reference` writes the table of docs/reference/llm-d.md.
Read `flags` first.

Source: llm-d/llm-d-router v0.10.0 (commit 71f4f0999f95) and, for newer flags, its main branch as
red-hat-data-services/llm-d-router carries it (commit 1f2d25d7e30a), pkg/epp/server/options.go,
pkg/common/observability/logging/options.go and cmd/epp/runner/runner.go.
"""
