"""What llm-d's router has and Tandem does not need: an adapter for those who come from it.

    plugins/   `EndpointPickerConfig`: a choice by filters and scorers, in place of the cost
    flags      the command line of llm-d's EPP; `options` and `values` read it
    metrics/   metrics under llm-d's names

Nothing of Tandem's own imports it but the process, which reads the configuration by it, and `main`.

Source: llm-d/llm-d-router v0.10.0 (commit 71f4f0999f95) and, for what is newer, its main branch as
red-hat-data-services/llm-d-router carries it (commit 1f2d25d7e30a), pkg/epp/server/options.go,
pkg/common/observability/logging/options.go and cmd/epp/runner/runner.go.
"""
