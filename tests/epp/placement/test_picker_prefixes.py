"""The picker and the prefix index: what draws a request to a pod, and what does not."""

import base64
import json
from random import Random

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.timing import Timing
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement

from .test_picker import LONG, NOW, PickerSetup

RANDOM = Random(2)
OK = ResponseHeaders(None, 200)


def chat(setup: PickerSetup, content: object) -> Placement:
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = HttpRequest("POST", PATHS[RequestKind.CHAT], {wire.REQUEST_ID: "r"})
    return setup.picker.place(request, body, NOW)


def test_retries_do_not_return_to_the_pod_that_failed() -> None:
    setup = PickerSetup(enabled=False, **{f"u{number}": "unified" for number in range(10)})
    first, _ = setup.place()
    first.on_response_headers(ResponseHeaders(None, 500), NOW)
    first.end(NOW)
    failing, returned = first.decode, 0
    for _ in range(50):
        placement, _ = setup.place()
        returned += placement.decode is failing
        status = 500 if placement.decode is failing else 200
        placement.on_response_headers(ResponseHeaders(None, status), NOW)
        placement.end(NOW)
    assert returned <= 2


def test_images_do_not_push_conversations_out_of_the_index() -> None:
    setup = PickerSetup(enabled=False, u="unified")
    setup["u"].apply_scrape(ScrapeResult(Gauges(), b"1", 16, 31_250))
    texts = [base64.b64encode(RANDOM.randbytes(6000)).decode() for _ in range(100)]
    pictures = [base64.b64encode(RANDOM.randbytes(1_000_000)).decode() for _ in range(2)]
    images = [{"image_url": {"url": f"data:image/png;base64,{picture}"}} for picture in pictures]
    for content in [*texts, *([{"type": "image_url", **image}] for image in images)]:
        placement = chat(setup, content)
        placement.on_response_headers(OK, NOW)
        placement.end(NOW)
    assert min(chat(setup, text).decision.cached_tokens for text in texts) > 1900


def test_a_growing_conversation_stays_on_its_pod() -> None:
    setup = PickerSetup(enabled=False, a="unified", b="unified", c="unified")
    turns: list[dict[str, str]] = []
    pods = set()
    for number in range(6):
        turns.append({"role": "user", "content": f"{number} question " * 60})
        body = json.dumps({"model": "m", "messages": turns}).encode()
        request = HttpRequest("POST", PATHS[RequestKind.CHAT], {wire.REQUEST_ID: "r"})
        placement = setup.picker.place(request, body, NOW)
        pods.add(placement.decode.name)
        new = sum(len(json.dumps(turn)) for turn in turns[-2:]) / 4
        assert placement.decision.cached_tokens >= placement.decision.prompt_tokens - new - 64
        placement.on_response_headers(OK, NOW)
        placement.end(NOW)
        turns.append({"role": "assistant", "content": f"{number} answer " * 60})
    assert len(pods) == 1


def test_a_repeated_prompt_is_cached_whatever_the_length_of_tokens() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    for _ in range(100):
        setup.fleet.token_scales.learn("m", 1000, 4000)
    for text in (LONG, LONG + 44 * "x", 20 * LONG):
        first, plan = setup.place(text)
        assert plan.path is RoutingPath.PREFILL_THEN_DECODE
        first.on_response_headers(OK, NOW)
        assert setup.place(text)[1].path is RoutingPath.FAST_DECODE
        setup.fleet.prefixes.clear(setup["d"])


def test_tokens_are_counted_as_engines_count_them() -> None:
    setup = PickerSetup(enabled=False, u="unified")
    for _ in range(50):
        placement, _ = setup.place(f"{RANDOM.random()}{LONG}")
        counted = 2 * len(LONG) // 4
        timing = Timing(cached=0, computed=counted).encode()
        placement.on_response_headers(ResponseHeaders(timing, 200), NOW)
        placement.end(NOW)
    assert placement.decision.prompt_tokens > 1.9 * len(LONG) // 4
    repeated, _ = setup.place(LONG)
    repeated.on_response_headers(OK, NOW)
    cached = setup.place(LONG)[0].decision.cached_tokens
    assert 1.9 * len(LONG) // 4 < cached <= counted
    # Token ids are counted, not estimated.
    assert setup.place(list(range(70)))[0].decision.prompt_tokens == 70
    blocks = ScrapeResult(Gauges(), b"1", 16, 1000)
    setup["u"].apply_scrape(blocks)
    for number in range(30):
        placement, _ = setup.place(f"{number}{LONG}")
        placement.on_response_headers(OK, NOW)
    assert setup.fleet.prefixes._cached.tokens(setup["u"]) < 16 * 1000 / 1.9
