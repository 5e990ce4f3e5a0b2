"""Which paths clients may request: no other way of writing a path gets around the list."""

from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem_contract.api_paths import API, FORMS, SCRAPED, ApiPaths
from tandem_contract.request_kinds import PATHS

DEFAULT = ApiPaths()

ADMINISTRATIVE = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/start_profile", "/stop_profile", "/pause"),
    *("/collective_rpc", "/update_weights", "/abort_requests", "/inference/v1/abort_requests"),
    *("/scale_elastic_ep", "/server_info", "/metrics", "/invocations", "/docs", "/openapi.json"),
)
"""Paths of vLLM 0.32 that clients must not reach."""


@pytest.mark.parametrize("path", [path for path in API if "*" not in path])
def test_a_path_of_the_api_is_served_with_and_without_a_query(path: str) -> None:
    assert path in DEFAULT
    assert f"{path}?a=b/../c" in DEFAULT


@pytest.mark.parametrize(
    "path",
    ["/v1/models/m", "/v1/batches", "/v1/files", "/v1/responses/resp_1/input_items"],
)
def test_paths_of_openai_that_vllm_does_not_serve_are_not_served(path: str) -> None:
    assert path not in DEFAULT


def test_generations_and_forms_are_paths_of_the_api() -> None:
    assert {*PATHS.values(), *FORMS} <= API.keys()
    assert not SCRAPED & API.keys()


def test_a_star_is_one_segment() -> None:
    assert "/v1/responses/resp_1a-2.b" in DEFAULT
    assert "/v1/responses/resp_1/cancel?x" in DEFAULT
    for target in (
        "/v1/responses/",
        "/v1/responses/a/b",
        "/v1/responses/a/cancel/",
        "/v1/responses//",
    ):
        assert target not in DEFAULT


@pytest.mark.parametrize(
    "spelling",
    [
        *("{}", "/{}", "{}/", "{}?x=/v1/models", "{}#/v1/models", "/v1/models/..{}", "/v1/..{}"),
        *("/v1/models;{}", "/v1/models%3f{}", "/v1/responses/..{}", "/v1/responses/%2e%2e{}"),
        *("/v1/responses/..%2f..{}", "/v1/models/../..{}", "/v1/models\\..{}", "/./{}", "/%2f{}"),
    ],
)
def test_no_spelling_of_an_administrative_path_is_served(spelling: str) -> None:
    escaped = [f"/%{ord(path[1]):02x}{path[2:]}" for path in ADMINISTRATIVE]
    paths = [spelling.format(path) for path in (*ADMINISTRATIVE, *escaped)]
    assert [path for path in paths if path in DEFAULT] == []


@pytest.mark.parametrize("path", ["/V1/models", "/v1/Models", "/v1/models/", " /v1/models", ""])
def test_a_path_counts_as_it_is_written(path: str) -> None:
    assert path not in DEFAULT


@given(st.text(alphabet="/.%2eE5fav1resposn;\\*#", max_size=40))
@example("/v1/responses/%2e%2e")
def test_a_path_that_is_served_has_one_reading(rest: str) -> None:
    for target in (f"/v1{rest}", f"/v1/responses/{rest}"):
        if target in DEFAULT:
            path = target.partition("?")[0]
            assert unquote(path) == path
            assert not {"", ".", ".."} & set(path[1:].split("/"))


def test_an_operator_adds_paths() -> None:
    paths = ApiPaths(["/version", "/v1/files/*/content", "/custom/**", "/v1/models"])
    assert paths.added == ("/version", "/v1/files/*/content", "/custom/**")
    for target in ("/version", "/v1/files/7/content?x", "/custom/a", "/custom/a/b", "/v1/models"):
        assert target in paths
    for target in ("/custom", "/custom/", "/custom/../sleep", "/custom//sleep", "/v1/files/7"):
        assert target not in paths
    assert "/sleep" in ApiPaths(["/**"])
    assert "/../sleep" not in ApiPaths(["/**"])


@pytest.mark.parametrize(
    "path",
    ["", "sleep", "/a?b", "/a//b", "/a/", "/../a", "/a%20", "/a*", "/**/a", "/a/***", "/a b"],
)
def test_an_added_path_that_is_written_otherwise_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is no path of an API"):
        ApiPaths([path])
