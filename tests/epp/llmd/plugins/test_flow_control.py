"""llm-d's flow control: its gate, its section and the policies that it names."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from time import time

import pytest
from click.testing import CliRunner

from tandem_contract.config import DisaggregatedServing, FlowControl
from tandem_contract.documents import DocumentError, parse_documents
from tandem_epp.choice.routing import Scheduling
from tandem_epp.flow.ceilings import HoldbackCeilings, SoftCeilings, StaticCeilings
from tandem_epp.flow.detectors import ConcurrencyDetector, UtilizationDetector
from tandem_epp.flow.settings import UNLIMITED, BandSettings, FlowSettings
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.llmd.plugins.explain_flow import flow_lines
from tandem_epp.llmd.plugins.score_choice import ScoreChoice
from tandem_epp.main import main

from ...flow.test_control import FlowSetup, refused

GATE = "featureGates: [flowControl]\n"
FULL = """\
featureGates: [flowControl]
plugins:
- {type: concurrency-detector, name: by-requests, parameters: {maxConcurrency: 2}}
- {type: priority-holdback-policy, name: hold-back, parameters: {minCeiling: 0.5}}
- {type: round-robin-fairness-policy}
- {type: edf-ordering-policy}
- {type: slo-deadline-ordering-policy}
flowControl:
  maxBytes: 2Gi
  maxRequests: 1k
  defaultRequestTTL: 30s
  noEndpointRequestTTL: 5m
  defaultPriorityBand: {fairnessPolicyRef: round-robin-fairness-policy}
  defaultNegativePriorityBand: {maxRequests: 3}
  priorityBands:
  - {priority: 10, maxBytes: 500M, maxRequests: 100, orderingPolicyRef: edf-ordering-policy}
  - {priority: 5, orderingPolicyRef: slo-deadline-ordering-policy, defaultRequestTTL: 1s}
  usageLimitPolicyPluginRef: hold-back
  saturationDetector: {pluginRef: by-requests}
"""
GIGABYTE = 1_000_000_000


def scheduling(
    text: str, gates: Mapping[str, bool] | None = None, own: FlowControl | None = None
) -> Scheduling:
    document = parse_documents(text, "router.yaml")[0]
    return load_scheduling(
        document,
        document.data,
        DisaggregatedServing(),
        flow=own or FlowControl(),
        gates=gates or {},
    )


def flow(text: str, **gates: bool) -> FlowSettings:
    settings = scheduling(text, gates).flow
    assert settings is not None
    return settings


def test_the_gate_alone_has_llmds_defaults() -> None:
    settings = flow(GATE)
    assert settings == FlowSettings(
        default=BandSettings(60.0, 5000, GIGABYTE, "none", "arrival"),
        no_endpoint_ttl=60.0,
        is_shedding=False,
        detector=UtilizationDetector(5, 0.8, 0.2, 0.0),
        ceilings=StaticCeilings(1.0),
    )
    assert settings.max_bytes == settings.max_requests == UNLIMITED


def test_every_field_counts() -> None:
    settings = flow(FULL)
    assert settings.default == BandSettings(30.0, 5000, GIGABYTE, "requests", "arrival")
    assert settings.negative == BandSettings(30.0, 3, GIGABYTE, "none", "arrival")
    assert settings.bands == {
        10: BandSettings(30.0, 100, 500_000_000, "none", "deadline"),
        5: BandSettings(1.0, 5000, GIGABYTE, "none", "ttft"),
    }
    assert (settings.max_bytes, settings.max_requests) == (2 << 30, 1000)
    assert settings.no_endpoint_ttl == settings.longest_ttl == 300.0
    assert settings.detector == ConcurrencyDetector(2)
    assert settings.ceilings == HoldbackCeilings(0.5)
    assert (settings.band(-1), settings.band(7)) == (settings.negative, settings.default)


def test_no_time_limit_is_the_longest_that_a_request_is_held() -> None:
    settings = flow(GATE + "flowControl: {defaultRequestTTL: 0s}")
    assert settings.default.ttl == settings.no_endpoint_ttl == 29 * 60


def test_policies_of_the_file() -> None:
    text = GATE + "flowControl: {usageLimitPolicyPluginRef: soft-reflective-ceiling-policy}"
    assert flow(text).ceilings == SoftCeilings()
    text = GATE + "flowControl: {defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}}"
    assert flow(text).default.fairness == "tokens"
    text = GATE + "flowControl: {saturationDetector: {pluginRef: predicted-cost-detector}}"
    assert flow(text).detector is None
    # As llm-d's older files have it.
    text = GATE + "saturationDetector: {pluginRef: concurrency-detector}"
    assert flow(text).detector == ConcurrencyDetector()


def test_the_command_line_overrules_the_gates_of_the_file() -> None:
    assert scheduling(GATE, {"flowControl": False}).flow is None
    assert scheduling("{}", {"flowControl": True}).flow == flow(GATE)
    assert scheduling("featureGates: [flowControl=false]").flow is None


def notices(found: Scheduling) -> list[str]:
    return [str(notice) for notice in found.notices]


def test_what_has_no_effect_is_listed() -> None:
    section = "flowControl: {maxBytes: 1}"
    found = scheduling(section)
    assert found.flow is None
    assert notices(found) == [
        "router.yaml:1: flowControl has no effect: it counts with featureGates: [flowControl] only"
    ]
    found = scheduling(GATE + section, own=FlowControl(enabled=True))
    assert found.flow == FlowSettings(bands={}, max_bytes=1 << 30)
    assert notices(found) == [
        "router.yaml:2: flowControl has no effect: flow_control, which is on, counts instead"
    ]
    found = scheduling(GATE + "flowControl:\n  enableEviction: true")
    assert notices(found) == [
        "router.yaml:3: flowControl.enableEviction has no effect: requests that a backend has are "
        "not ended for others"
    ]
    assert notices(scheduling(FULL)) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{defaultRequestTTL: 31m}", ":2: .*31m is not from 0s to 29m"),
        ("{defaultRequestTTL: soon}", ":2: .*'soon' is not a duration"),
        ("{maxBytes: lots}", ":2: .*'lots' is not an amount"),
        ("{priorityBands: [{priority: 1}, {priority: 1}]}", "1 is in the list already"),
        ("{saturationDetector: {pluginRef: fcfs-ordering-policy}}", "no saturation detector plug"),
        ("{usageLimitPolicyPluginRef: priority-holdback-policy}", "minCeiling"),
        ("{defaultPriorityBand: {fairnessPolicyRef: edf-ordering-policy}}", "is no fairness plug"),
    ],
)
def test_a_mistake_is_refused_with_its_line(section: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        scheduling(f"{GATE}flowControl: {section}")


def test_a_detector_in_a_profile_is_a_filter_and_elsewhere_none() -> None:
    listed = "plugins: [{type: concurrency-detector}, {type: queue-scorer}]\n"
    chooser = scheduling(listed).chooser
    assert isinstance(chooser, ScoreChoice)
    assert chooser.summary.decode.filters == ("decode-filter",)
    profile = (
        "schedulingProfiles: [{name: d, plugins: "
        "[{pluginRef: concurrency-detector}, {pluginRef: queue-scorer}]}]"
    )
    chooser = scheduling(listed + profile).chooser
    assert isinstance(chooser, ScoreChoice)
    assert chooser.summary.decode.filters == ("decode-filter", "concurrency-detector")


def test_detectors_and_policies_leave_the_choice_to_the_cost() -> None:
    assert scheduling(FULL).chooser is None


def test_check_config_says_what_each_does() -> None:
    assert list(flow_lines(flow(FULL))) == [
        "flow control: requests wait while each pod has 2 requests on average",
        "  from 100% of that on, the lowest priority from 50% on",
        f"  all priorities: at most 1000 requests of {2 << 30} bytes",
        "  priority 10: at most 100 requests of 500000000 bytes, for 30s; tenants are not told "
        "apart; first whose time to wait ends first",
        "  priority 5: at most 5000 requests of 1000000000 bytes, for 1s; tenants are not told "
        "apart; first whose target for the first token ends first",
        "  other priorities: at most 5000 requests of 1000000000 bytes, for 30s; tenants take "
        "turns; first come, first served",
        "  other negative priorities: at most 3 requests of 1000000000 bytes, for 30s; tenants "
        "are not told apart; first come, first served",
        "  while there is no pod: up to 5m",
    ]
    assert not list(flow_lines(None))
    assert "queues of 5 or KV caches of 80%" in next(flow_lines(flow(GATE)))


def set_up(text: str) -> FlowSetup:
    setup = FlowSetup()
    setup.flow.settings = flow(text)
    return setup


async def test_requests_wait_for_the_detector_and_bands_are_bounded() -> None:
    setup = set_up(FULL)
    running = [await setup.send(priority="10") for _ in range(2)]
    assert setup.flow.waiting == 0
    waiting = [asyncio.create_task(setup.send(priority="-1")) for _ in range(3)]
    await asyncio.sleep(0)
    assert setup.flow.waiting == 3
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send(priority="-1")
    for placement in running:
        placement.end(time())
    # The lowest of the known priorities goes below half of what the pod takes: one at a time.
    for done in asyncio.as_completed(waiting):
        (await done).end(time())
    assert setup.flow.waiting == 0


async def test_without_fairness_tenants_are_not_told_apart() -> None:
    policies = "flowControl: {saturationDetector: {pluginRef: concurrency-detector}}\n"
    plugins = "plugins: [{type: concurrency-detector, parameters: {maxConcurrency: 1}}]\n"
    setup = set_up(GATE + policies + plugins)
    first, order = await setup.send(), list[str]()

    async def send(tenant: str) -> None:
        placement = await setup.send(x_llm_d_inference_fairness_id=tenant)
        order.append(tenant)
        placement.end(time())

    tasks = []
    for tenant in "aaabab":
        tasks.append(asyncio.create_task(send(tenant)))
        await asyncio.sleep(0)
    first.end(time())
    await asyncio.gather(*tasks)
    assert "".join(order) == "aaabab"


async def test_the_earliest_target_for_the_first_token_goes_first() -> None:
    setup = set_up(FULL.replace("maxConcurrency: 2", "maxConcurrency: 1"))
    first, order = await setup.send(), list[str]()

    async def send(**headers: str) -> None:
        placement = await setup.send(priority="5", **headers)
        order.append(headers.get("x_llm_d_slo_ttft_ms", ""))
        placement.end(time())

    tasks = []
    for target in ("", "900", "x", "100", "500"):
        headers = {"x_llm_d_slo_ttft_ms": target} if target else {}
        tasks.append(asyncio.create_task(send(**headers)))
        await asyncio.sleep(0)
    first.end(time())
    await asyncio.gather(*tasks)
    assert order == ["100", "500", "900", "", "x"]


@pytest.mark.parametrize(("ttl", "needed"), [("30s", "35s"), ("5m", "305s")])
def test_check_config_says_what_a_gateway_needs(tmp_path: Path, ttl: str, needed: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"flow_control: {{enabled: true, ttl: {ttl}}}")
    lines = CliRunner().invoke(main, ["--check-config", str(file)]).output.splitlines()
    assert f"max_message_timeout, of at least {needed} in ext_proc" in lines[-1]
    file.write_text("{}")
    assert "BUFFERED" not in CliRunner().invoke(main, ["--check-config", str(file)]).output
