"""Kinds and plurals of Tandem's custom resources; group and version are in `labels`."""

from collections.abc import Mapping
from typing import Final

PREFILL_POOL: Final = "PrefillPool"
DECODE_POOL: Final = "DecodePool"

PLURALS: Final[Mapping[str, str]] = {PREFILL_POOL: "prefillpools", DECODE_POOL: "decodepools"}
"""Kind → the name in API paths and RBAC rules."""
