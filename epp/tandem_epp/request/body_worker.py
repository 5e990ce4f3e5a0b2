"""The process that reads large bodies for an EPP: `python -m tandem_epp.request.body_worker`.

To decode JSON takes up to 40 ms per megabyte, in single calls that no other thread interrupts, and
to search a large form 20 ms and more, so only another process keeps it from the EPP's other
streams. Bodies come on stdin, what was read of them leaves on stdout, one after the other; the end
of stdin ends the process.
"""

import os
import signal
import sys
import traceback
from struct import Struct as Format
from typing import BinaryIO, Final

import msgspec

from tandem_contract.chains import Chain
from tandem_contract.prompt_length import NO_TEXT, PromptText
from tandem_contract.request_kinds import BodyKind, PooledKind, RequestKind

from .bodies import parse_body
from .body_fields import BadBody
from .form import find_form_model
from .inference import InferenceRequest, read_model
from .prompt_key import PromptForm

HEADER: Final = Format(">BHI")
"""Before each body: its kind's place in `KINDS`, and the sizes in bytes of a form's content type,
which precedes the body, and of the body. Before each answer: 0, 0, and the size."""
KINDS: Final = (None, *RequestKind, *PooledKind)
"""None: a body of which only the model is read."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What was read of a body."""

    refusal: str | None = None
    """What is wrong with the body; None: nothing."""
    fault: str | None = None
    """What is wrong with this program; None: nothing."""
    is_request: bool = False
    """Whether the body is of a known kind, so that more than the model was read."""
    model: str | None = None
    assumed_tokens: int = 0
    chain: bytes = b""
    """The prefix chain's items."""
    single_engine_reason: str | None = None
    needs_sidecar: bool = False
    is_stream: bool = False
    max_tokens: int | None = None
    form: PromptForm = PromptForm.OTHER
    media_parts: int = 0
    previous_response: str = ""
    fingerprint: int = 0
    text: PromptText = NO_TEXT
    form_model: tuple[int, int] | None = None
    """Where the model stands in a form: `request.form.FormModel`; None: the body is no form."""

    def request(self) -> InferenceRequest | None:
        """The request, without its prompt; None if only the model was read."""
        if not self.is_request:
            return None
        return InferenceRequest(
            model=self.model,
            prompt=b"",
            single_engine_reason=self.single_engine_reason,
            needs_sidecar=self.needs_sidecar,
            is_stream=self.is_stream,
            max_tokens=self.max_tokens,
            form=self.form,
            read_tokens=self.assumed_tokens,
            chain=Chain("Q", self.chain),
            media_parts=self.media_parts,
            previous_response=self.previous_response,
            fingerprint=self.fingerprint,
            text=self.text,
        )


def read(kind: BodyKind | None, body: bytes, form_type: str = "") -> Reading:
    """What a pick needs to know of a body. `form_type`: the content type of a form; empty: JSON."""
    try:
        if form_type:
            value, start, end = find_form_model(form_type, body)
            return Reading(model=value, form_model=(start, end))
        if kind is None:
            return Reading(model=read_model(body))
        request = parse_body(kind, body)
    except BadBody as err:
        return Reading(refusal=str(err))
    return Reading(
        is_request=True,
        model=request.model,
        assumed_tokens=request.assumed_tokens,
        chain=request.chain.tobytes(),
        single_engine_reason=request.single_engine_reason,
        needs_sidecar=request.needs_sidecar,
        is_stream=request.is_stream,
        max_tokens=request.max_tokens,
        form=request.form,
        media_parts=request.media_parts,
        previous_response=request.previous_response,
        fingerprint=request.fingerprint,
        text=request.text,
    )


def serve(bodies: BinaryIO, answers: BinaryIO) -> None:
    """Read bodies until there are no more."""
    while len(header := bodies.read(HEADER.size)) == HEADER.size:
        kind, type_size, size = HEADER.unpack(header)
        try:
            form_type = bodies.read(type_size).decode("latin-1")
            reading = read(KINDS[kind], bodies.read(size), form_type)
        # The EPP counts it, and places the request all the same.
        except Exception as err:  # noqa: BLE001
            traceback.print_exc()
            reading = Reading(fault=repr(err))
        answer = msgspec.msgpack.encode(reading)
        answers.write(HEADER.pack(0, 0, len(answer)) + answer)
        answers.flush()


def main() -> None:
    """Serve the EPP that started this process."""
    # Ctrl-C reaches the whole group; the EPP still needs this process while it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Large bodies are rare and slow anyway: all other requests go first.
    os.nice(5)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
