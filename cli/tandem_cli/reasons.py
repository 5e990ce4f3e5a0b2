"""The reasons of decisions, as sentences. Pure.

A reason is a label of `tandem_epp_decisions_total`; `docs/operate/troubleshooting.md` has the same
list. The reasons for which one engine must serve a request alone are in
`tandem_contract.single_engine`.
"""

from collections.abc import Mapping
from typing import Final

REASONS: Final[Mapping[str, str]] = {
    "worth_it": "a prefill pod computes the prompt, and the KV transfer is worth it",
    "cached": "the decode pod has the KV of the prompt already, up to its end",
    "stored": "the decode pod loads the KV of the prompt from external storage, up to its end",
    "cheaper_here": "one pod costs less than any pair of a prefill and a decode pod",
    "transfer_too_long": "the KV transfer would take more than half as long as computing it here",
    "not_disaggregated": "no pod may prefill for this one",
    "split_off": "the configuration turns splitting off (routing.split, or plugins)",
    "short_prompt": "the prompt has fewer than nonCachedTokens tokens",
    "mostly_cached": "fewer than nonCachedTokens tokens of the prompt are not cached",
    "always": "always-disagg-pd-decider splits each request that may be split",
    "no_prefill_backend": "it was to be split, but no pod that could prefill for it is ready",
    "no_decode_backend": "no decode pod is ready",
    "fault": "the EPP could not choose because of a bug, which its log shows: any pod serves it",
    "pooling": "the request generates nothing: one pod computes its prompts",
    "passthrough": "the EPP does not read requests of this kind",
}
"""Reason → why the path was taken."""
