"""Look-ups in the index of external stores, by result."""

import json

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.precise import PrecisePrefixes
from tandem_epp.prefix.kv_events.settings import EventSettings


@pytest.mark.parametrize(
    ("stored_bytes", "prompt", "lookups"),
    [
        pytest.param(1 << 20, [1, 2, 3], {"missing": 1}, id="token ids"),
        pytest.param(1 << 20, "text", {"unknown": 1}, id="text without a tokenizer"),
        pytest.param(0, [1, 2, 3], {}, id="without storage_offloading"),
    ],
)
async def test_lookups_are_counted(
    stored_bytes: int, prompt: object, lookups: dict[str, int]
) -> None:
    precise = PrecisePrefixes(Fleet(), lambda *_: None)
    precise.apply(EventSettings(), (), stored_bytes)
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    await precise.prepare(RequestKind.COMPLETIONS, body)
    await precise.close()
    assert dict(precise.lookups) == lookups
