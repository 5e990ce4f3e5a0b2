"""What is read in a prefill's answer, whatever its kind."""

from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.transfer_params import ParamsUnusable

_NOTHING: Final = Raw(b"null")


class PrefillAnswer(msgspec.Struct):
    """The fields a hand-off needs; the others are skipped."""

    kv_transfer_params: Raw = _NOTHING
    prompt_token_ids: Raw = _NOTHING


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ending(msgspec.Struct):
    """How each kind says that it stopped: choices, messages' reason, responses' status."""

    choices: list[_Choice] = []
    stop_reason: str | int | None = None
    status: str | int | None = None


_answer: Final = msgspec.json.Decoder(PrefillAnswer)
_ending: Final = msgspec.json.Decoder(_Ending)
_BY_LENGTH: Final = frozenset({None, "length", "max_tokens", "incomplete"})


def read_answer(answer: bytes) -> PrefillAnswer:
    """Raises ParamsUnusable for what is no JSON object."""
    try:
        return _answer.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable("the answer is no JSON object") from err


def check_ended_by_length(answer: bytes) -> None:
    """Raises ParamsUnusable for a prefill that ended otherwise: its KV is not handed on."""
    try:
        ending = _ending.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable("the answer is no JSON object") from err
    said = {choice.finish_reason for choice in ending.choices} | {ending.stop_reason, ending.status}
    if not said <= _BY_LENGTH:
        raise ParamsUnusable("the prefill ended before its one token: its KV is not handed on")
