"""A tokenizer for each model that the pods serve.

A single one tokenizes for all requests. Of several, each tokenizes for the model that it is
configured for and for that model's LoRA adapters.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from tandem_contract.prompt_length import ANY_VOCABULARY, TokenSizes
from tandem_contract.request_kinds import RequestKind

from ..block_keys import TokenizedPrompt
from . import TokenizerUnusable
from .source import named_model
from .tokenizer import PromptTokenizer, TokenizerSettings

MAX_TOKENIZERS: Final = 16
"""Models at most. Each takes tens of megabytes with a model directory, and `cache_bytes`."""
_log: Final = logging.getLogger(__name__)


class ModelTokenizers:
    """Chooses the tokenizer of a request by the model that it names, on one event loop."""

    def __init__(
        self, settings: Sequence[TokenizerSettings], observe: Callable[[str, float], None]
    ) -> None:
        """Without settings, only prompts that come as token ids are known. A tokenizer that cannot
        be used is logged, and leaves only those of its model. `observe`: see `PromptTokenizer`."""
        self._observe = observe
        settings = settings or (TokenizerSettings(),)
        self._tokenizers = [_usable(each, observe) for each in settings]
        self._by_model = {
            name: tokenizer
            for each, tokenizer in zip(settings, self._tokenizers, strict=True)
            for name in (each.model, *each.adapters)
        }

    async def tokenize(self, kind: RequestKind, body: bytes) -> TokenizedPrompt | None:
        """The prompt's token ids; None when it cannot be tokenized, or not in time."""
        tokenizer = self._tokenizer(lambda: named_model(body))
        if tokenizer is None:
            self._observe("refused", 0.0)
            return None
        return await tokenizer.tokenize(kind, body)

    def sizes(self, model: str | None) -> TokenSizes:
        """What no token of a request for `model` exceeds."""
        tokenizer = self._tokenizer(lambda: model)
        return ANY_VOCABULARY if tokenizer is None else tokenizer.sizes

    async def close(self) -> None:
        """Stop tokenizing."""
        for tokenizer in self._tokenizers:
            await tokenizer.close()

    def _tokenizer(self, model: Callable[[], str | None]) -> PromptTokenizer | None:
        if len(self._tokenizers) == 1:
            return self._tokenizers[0]
        return self._by_model.get(model() or "")


def several_tokenizers_mistake(settings: Sequence[TokenizerSettings]) -> str | None:
    """What is wrong with the last of `settings` beside those before it; None: nothing."""
    *others, last = settings
    if not last.model:
        return "modelName: missing; of several tokenizers, each is for one model"
    known = {name for other in others for name in (other.model, *other.adapters)}
    if doubles := sorted(known & {last.model, *last.adapters}):
        return f"{doubles[0]}: another tokenizer is for this model"
    if len(settings) > MAX_TOKENIZERS:
        return f"more than {MAX_TOKENIZERS} tokenizers: remove some, or use more than one EPP"
    return None


def _usable(settings: TokenizerSettings, observe: Callable[[str, float], None]) -> PromptTokenizer:
    try:
        return PromptTokenizer(settings, observe)
    except TokenizerUnusable as err:
        _log.error("prompts are matched approximately: %s", err)
        return PromptTokenizer(TokenizerSettings(model=settings.model), observe)
