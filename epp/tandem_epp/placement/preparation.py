"""What is found out about a request's body before the pick, because it takes time or must wait."""

from dataclasses import dataclass
from typing import Final

from tandem_contract.prompt_length import ANY_VOCABULARY, TokenSizes

from ..exchange import HttpRequest, NotPlaced
from ..prefix.kv_events.collector import PreciseMatch
from ..request.bodies import kind_of, named_model, parse_body
from ..request.body_fields import BadBody
from ..request.body_worker import Reading
from ..request.inference import InferenceRequest
from ..request.model_rewrites import Rewrite

MAX_MODEL: Final = 4096
"""Characters of a model's name; no engine serves one nearly as long."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The value of `HttpRequest.preparation`."""

    reading: Reading | None = None
    """What another process read of a large body; None: it was not asked."""
    parsed: InferenceRequest | None = None
    """None: not read."""
    precise: PreciseMatch | None = None
    """What the precise index found; None: nothing, or it is off."""
    rewrite: Rewrite | None = None
    """The request with another model, of which all of this is; None: it stays."""
    began: float | None = None
    """When the body was complete, by `perf_counter`; None: it is not prepared."""
    sizes: TokenSizes = ANY_VOCABULARY
    """What no token of the model exceeds."""
    held: float = 0.0
    """Seconds that it waited in flow control."""
    subset: frozenset[str] | None = None
    """Addresses of the pods that have room for it; None: any may get it."""
    refusal: NotPlaced | None = None
    """Its answer, where flow control refused it; None: it is placed."""

    def precise_of(self, parsed: InferenceRequest | None) -> PreciseMatch | None:
        """`precise`, which also tells the true length of the prompt in `parsed`."""
        if self.precise is None or parsed is None:
            return None
        parsed.set_length(self.precise.prompt_tokens)
        return self.precise


def preparation_of(request: HttpRequest) -> Preparation:
    """What was found out about the body of `request`."""
    return request.preparation if isinstance(request.preparation, Preparation) else NO_PREPARATION


def parse(request: HttpRequest, body: bytes) -> InferenceRequest | None:
    """What a pick reads of the body; None for a request whose body is not read. Raises BadBody."""
    kind = kind_of(request)
    return parse_body(kind, body) if kind is not None else None


def read_body(
    prepared: Preparation, request: HttpRequest, body: bytes | None
) -> tuple[InferenceRequest | None, str | None]:
    """What a pick reads of the body, and the model that it names. Raises BadBody."""
    if body is None:
        # The gateway's body mode keeps it from the EPP: the pick follows from the headers alone.
        return None, None
    if prepared.reading is not None and prepared.reading.refusal is not None:
        raise BadBody(prepared.reading.refusal)
    if (parsed := prepared.parsed) is None:
        if prepared.reading is not None:
            return None, _bounded(prepared.reading.model)
        parsed = parse(request, body)
    return parsed, _bounded(parsed.model if parsed is not None else named_model(request, body))


def _bounded(model: str | None) -> str | None:
    # It is kept as long as its request runs, and longer by what learns of models.
    if model is not None and len(model) > MAX_MODEL:
        raise BadBody(f"model: a name has at most {MAX_MODEL} characters")
    return model


NO_PREPARATION: Final = Preparation()
