"""Reads from vLLM's requests what keys depend on and what KV events contain."""

import logging
from pathlib import Path
from typing import Any

from tandem_kvstore.format.identity import Prompt

from .events import chunk_blocks
from .identity import adapter_hash
from .plan import storable_prompt
from .stored_chunks import BlocksStored

_log = logging.getLogger(__name__)


class VllmRequestReader:
    """`scheduler.RequestReader` for vLLM's own request objects."""

    def __init__(self, block_size: int, *, has_events: bool) -> None:
        """`has_events`: whether vLLM publishes KV events."""
        self._block, self._has_events = block_size, has_events

    def prompt(self, request: Any) -> Prompt | None:
        """The part of a request that its keys depend on; None: its KV must not be stored."""
        try:
            lora = request.lora_request
            adapter = adapter_hash(Path(lora.lora_path)) if lora is not None else ""
        except (OSError, ValueError) as err:
            text = "KV with a LoRA adapter is not stored, its weights are not readable: %s"
            _log.warning(text, err)
            return None
        return storable_prompt(
            request.all_token_ids,
            cache_salt=request.cache_salt,
            adapter=adapter,
            media=[(item.mm_position.offset, item.identifier) for item in request.mm_features],
            has_embeddings=request.prompt_embeds is not None,
        )

    def blocks(self, request: Any, start: int, end: int) -> BlocksStored | None:
        """The KV event for the request's tokens from `start` to `end`; None: no event."""
        return chunk_blocks(request, start, end, self._block) if self._has_events else None
