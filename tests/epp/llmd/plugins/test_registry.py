"""The registry: every entry can be built, and its parameters reach the plugin."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_contract.config import DisaggregatedServing, router_config
from tandem_contract.documents import parse_documents
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.llmd.plugins.decider import DeciderSettings
from tandem_epp.llmd.plugins.listed_plugins import ListedPlugins
from tandem_epp.llmd.plugins.plugin_types import Kind, Plugin
from tandem_epp.llmd.plugins.registry import PLUGINS, REGISTRY
from tandem_epp.llmd.plugins.unsupported import REFUSED

WITH_EFFECT = [
    plugin
    for plugin in PLUGINS
    if plugin.kind not in (Kind.NOT_NEEDED, Kind.NO_EFFECT, Kind.SOURCE)
]
EPP_PAGE = Path(__file__).parents[4] / "docs" / "run" / "picker.md"
REQUIRED: dict[str, dict[str, Any]] = {
    "by-label": {"label": "tier", "validValues": ["a"]},
    "header-label-affinity-scorer": {"headerName": "x-tier", "labelKey": "tier"},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 1}]},
    "priority-holdback-policy": {"minCeiling": 0.5},
    "session-id-producer": {"headerName": "x-session"},
}
"""Parameters of the plugins that cannot do without."""


def by_type_name(plugin: Plugin[Any]) -> str:
    return plugin.type_name


def test_type_names_are_unique() -> None:
    assert len(REGISTRY) == len(PLUGINS)


@pytest.mark.parametrize("plugin", WITH_EFFECT, ids=by_type_name)
def test_every_plugin_is_built_from_its_default_parameters(plugin: Any) -> None:
    parameters = msgspec.convert(REQUIRED.get(plugin.type_name, {}), plugin.parameters)
    listed = ListedPlugins(parse_documents("{}", "router.yaml")[0], ())
    made = plugin.events(parameters) if plugin.events else plugin.make(parameters, listed)
    assert made is not None


@pytest.mark.parametrize("plugin", PLUGINS, ids=by_type_name)
def test_every_plugin_loads_from_a_configuration(plugin: Plugin[Any]) -> None:
    name = plugin.type_name
    parameters = msgspec.json.encode(REQUIRED.get(name, {})).decode()
    text = f"plugins: [{{type: {name}, parameters: {parameters}}}]"
    document = parse_documents(text, "router.yaml")[0]
    load_scheduling(document, document.data, DisaggregatedServing(enabled=True))


@pytest.mark.parametrize("plugin", PLUGINS, ids=by_type_name)
def test_every_plugin_and_parameter_is_documented(plugin: Plugin[Any]) -> None:
    assert plugin.help
    schema = msgspec.json.schema(plugin.parameters)["$defs"][plugin.parameters.__name__]
    assert all("description" in field for field in schema["properties"].values())


@pytest.mark.parametrize("picker", ["max-score-picker", "random-picker", "weighted-random-picker"])
def test_parameters_reach_the_picker(picker: str) -> None:
    text = f"plugins: [{{type: {picker}, parameters: {{maxNumOfEndpoints: 3}}}}]"
    document = parse_documents(text, "router.yaml")[0]
    scheduling = load_scheduling(document, document.data, DisaggregatedServing())
    assert scheduling.chooser.decode.max_endpoints == scheduling.chooser.prefill.max_endpoints == 3


def test_each_profile_has_the_parameters_of_its_own_picker() -> None:
    document = parse_documents(
        """
plugins:
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 2}}
- {type: random-picker, parameters: {maxNumOfEndpoints: 5}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: max-score-picker}]}
- {name: prefill, plugins: [{pluginRef: random-picker}]}
""",
        "router.yaml",
    )[0]
    scheduling = load_scheduling(document, document.data, DisaggregatedServing())
    assert (scheduling.chooser.decode.max_endpoints, scheduling.chooser.prefill.max_endpoints) == (
        2,
        5,
    )


def test_a_decider_named_without_being_listed_has_its_default_parameters() -> None:
    text = (
        "plugins: [{type: disagg-profile-handler, parameters: "
        "{deciders: {prefill: prefix-based-pd-decider}}}]"
    )
    document = parse_documents(text, "router.yaml")[0]
    scheduling = load_scheduling(document, document.data, DisaggregatedServing())
    assert scheduling.chooser.decider == DeciderSettings()


@pytest.mark.interpreted
def test_the_example_in_the_documentation_loads() -> None:
    section = EPP_PAGE.read_text(encoding="utf-8").partition("## Configuration")[2]
    example = section.split("```yaml\n")[1].split("```")[0]
    document = parse_documents(example, "router.yaml")[0]
    config = router_config(document, {})
    scheduling = load_scheduling(document, config.extra, config.disaggregated_serving)
    assert scheduling.chooser.decider == DeciderSettings(non_cached_tokens=256)


def test_a_refused_plugin_is_none_that_works_and_names_one_that_does() -> None:
    assert not REFUSED.keys() & REGISTRY.keys()
    assert all(refused.nearest in REGISTRY for refused in REFUSED.values())
