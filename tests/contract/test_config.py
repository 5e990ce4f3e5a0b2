"""The router's configuration: documented examples, defaults, and every error with its line."""

from pathlib import Path
from typing import Any

import pytest

from tandem_contract.config import (
    Backend,
    Credentials,
    DisaggregatedServing,
    ExternalStorage,
    HealthChecks,
    RouterConfig,
    StorageOffloading,
    load_router_config,
)
from tandem_contract.documents import DocumentError
from tandem_contract.paths import Role
from tandem_contract.plan import ResumeLimits

SECRETS = {"STORAGE_ACCESS_KEY": "hush-access", "STORAGE_SECRET_KEY": "hush-secret"}
STORAGE = ExternalStorage("http://storage-cluster:8080", "inference/kv-cache")

FULL = """\
disaggregated_serving:
  enabled: false
  prefill_timeout: "30s"
  kv_transfer_timeout: "10s"
  fallback_to_unified: true
  default_external_storage:
    endpoint: "http://storage-cluster:8080"
    kv_namespace: "inference/kv-cache"
    credentials:
      access_key: "${STORAGE_ACCESS_KEY}"
      secret_key: "${STORAGE_SECRET_KEY}"
backends:
  - name: prefill-worker-1
    url: "http://vllm-prefill-1:8000"
    role: prefill
    external_storage:
      endpoint: "http://storage-cluster:8080"
      kv_namespace: "inference/kv-cache"
  - name: decode-worker-1
    url: "http://vllm-decode-1:8000"
    role: decode
    weight: 2
  - name: unified-fallback
    url: "http://vllm-unified:8000"
"""

MINIMAL = """\
disaggregated_serving:
  enabled: true
  default_external_storage:
    endpoint: "http://storage-cluster:8080"

backends:
  - name: prefill-gpu
    url: "http://vllm-prefill:8000"
    role: prefill
  - name: decode-gpu-1
    url: "http://vllm-decode:8000"
    role: decode
  - name: decode-gpu-2
    url: "http://vllm-decode-2:8000"
    role: decode
"""


def loaded(folder: Path, text: str, **environ: str) -> RouterConfig:
    file = folder / "router.yaml"
    file.write_text(text)
    return load_router_config(file, environ)


def test_the_full_example_loads(tmp_path: Path) -> None:
    config = loaded(tmp_path, FULL, **SECRETS)
    credentials = Credentials("hush-access", "hush-secret")
    assert config.disaggregated_serving == DisaggregatedServing(
        enabled=False,
        prefill_timeout=30.0,
        kv_transfer_timeout=10.0,
        fallback_to_unified=True,
        default_external_storage=ExternalStorage(
            "http://storage-cluster:8080", "inference/kv-cache", credentials
        ),
    )
    assert config.backends == (
        Backend("prefill-worker-1", "http://vllm-prefill-1:8000", Role.PREFILL, 1, STORAGE),
        Backend("decode-worker-1", "http://vllm-decode-1:8000", Role.DECODE, 2),
        Backend("unified-fallback", "http://vllm-unified:8000", Role.UNIFIED, 1),
    )


def test_streams_are_resumed_only_if_the_file_says_so(tmp_path: Path) -> None:
    def limits(section: str) -> ResumeLimits | None:
        return loaded(tmp_path, section).resume.limits

    assert limits("resume: {enabled: true}") == ResumeLimits(10.0, 2)
    text = "resume: {enabled: true, max_regeneration: 0s, max_moves: 1}"
    assert limits(text) == ResumeLimits(0.0, 1)
    for mode in ("auto", "always"):
        assert limits(f"resume: {{enabled: {mode}}}") == ResumeLimits(10.0, 2)
    for text in ("resume: {max_moves: 1}", "resume: {enabled: never}", "resume: {enabled: false}"):
        assert limits(text) is None
    assert limits(MINIMAL) is None


def test_what_is_split_is_read(tmp_path: Path) -> None:
    section = "{enabled: true, split: always, max_prefill_on_decode: 512}"
    serving = loaded(tmp_path, f"disaggregated_serving: {section}").disaggregated_serving
    assert (serving.split, serving.max_prefill_on_decode) == ("always", 512)


def test_the_minimal_example_takes_the_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINIMAL)
    assert config.disaggregated_serving == DisaggregatedServing(
        enabled=True,
        # The sidecars' own: see test_without_timeouts_in_the_plan_the_sidecars_own_hold.
        prefill_timeout=None,
        kv_transfer_timeout=None,
        fallback_to_unified=True,
        default_external_storage=STORAGE,
    )
    assert [(b.name, b.role) for b in config.backends] == [
        ("prefill-gpu", "prefill"), ("decode-gpu-1", "decode"), ("decode-gpu-2", "decode"),
    ]  # fmt: skip
    assert {b.external_storage for b in config.backends} == {None}


def test_where_backends_run_and_which_label_tells_it(tmp_path: Path) -> None:
    text = MINIMAL + "    node: node-1\n    domain: rack-1\n"
    text = text.replace("enabled: true", "enabled: true\n  domain_label: example.com/rack")
    config = loaded(tmp_path, text)
    assert [(b.node, b.domain) for b in config.backends] == [
        (None, None), (None, None), ("node-1", "rack-1"),
    ]  # fmt: skip
    assert config.disaggregated_serving.domain_label == "example.com/rack"
    default = loaded(tmp_path, MINIMAL).disaggregated_serving.domain_label
    assert default == "tandem.dev/fabric-domain"


@pytest.mark.parametrize("text", ["{}", "disaggregated_serving:\nbackends:\n"])
def test_an_omitted_or_null_field_takes_its_default(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text) == RouterConfig()


def test_other_fields_are_passed_on(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINIMAL + "plugins: [{type: random-picker}]\nkind: X\n")
    assert config.extra == {"plugins": [{"type": "random-picker"}], "kind": "X"}
    assert len(config.backends) == 3


def test_credentials_are_in_no_repr_and_no_error(tmp_path: Path) -> None:
    config = loaded(tmp_path, FULL, **SECRETS)
    assert "hush" not in repr(config)
    assert "hush" not in str(config)
    assert "redacted" in repr(config)
    with pytest.raises(DocumentError) as caught:
        loaded(tmp_path, FULL + "    weight: 0\n", **SECRETS)
    assert "hush" not in str(caught.value)


def test_variables_stand_in_credentials_only(tmp_path: Path) -> None:
    text = """\
backends:
- name: a
  url: http://a
  external_storage:
    endpoint: http://s/${NOT_READ}
    credentials: {access_key: 'x${A}y${A}', secret_key: $A}
"""
    (backend,) = loaded(tmp_path, text, A="1").backends
    assert backend.external_storage == ExternalStorage(
        "http://s/${NOT_READ}", credentials=Credentials("x1y1", "$A")
    )


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:8000", "a:8000"),
        ("http://a", "a:80"),
        ("https://a", "a:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://[fd00::2]", "[fd00::2]:80"),
    ],
)
def test_a_backend_has_an_address(url: str, address: str) -> None:
    assert Backend("a", url).address == address


def test_health_checks_are_read(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("health_checks: {path: /health, interval: 500ms, healthy_threshold: 2}")
    assert load_router_config(file).health_checks == HealthChecks(
        path="/health", interval=0.5, timeout=2.0, unhealthy_threshold=3, healthy_threshold=2
    )
    file.write_text("health_checks:")
    assert load_router_config(file).health_checks == HealthChecks()


SERVING = "disaggregated_serving:\n  enabled: true\n  "
FIRST = "backends:\n- name: a\n  url: http://a\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "expected one YAML mapping with disaggregated_serving and backends"),
        ("- a", 1, "expected one YAML mapping"),
        ("a: 1\n---\nb: 1", 1, "expected one YAML mapping"),
        ("a: [", 1, "not YAML"),
        ("a: 1\n2: b", 2, "is not a field name"),
        (SERVING + "prefill_timeout: 30", 3, r'prefill_timeout: 30 has no unit: write "30s"'),
        (SERVING + "prefill_timeout: thirty", 3, "prefill_timeout: 'thirty' is not a duration"),
        (SERVING + "kv_transfer_timeout: -1s", 3, "kv_transfer_timeout: '-1s' is not a duration"),
        (SERVING + "prefill_timeout: 0s", 3, "prefill_timeout: lets no hand-off succeed"),
        (SERVING + "kv_transfer_timeout: 0ms", 3, "kv_transfer_timeout: lets no hand-off"),
        (SERVING + "kv_transfer_timeout: null", 3, "kv_transfer_timeout: None has no unit"),
        (SERVING + 'split: "off"', 3, "split: is auto or always; .* write enabled: false"),
        (SERVING + "split: off", 3, "split: is auto or always; .* write enabled: false"),
        (SERVING + "max_prefill_on_decode: 15", 3, "15 is below 16: .* write split: always"),
        (SERVING + "max_prefill_on_decode: 5%", 3, "max_prefill_on_decode: Expected `int"),
        (SERVING + "fallback_to_unified: maybe", 3, "fallback_to_unified: Expected `bool`"),
        (SERVING + "timeout: 1s", 3, "unknown field `timeout`"),
        ("disaggregated_serving: yes", 1, "disaggregated_serving: Expected `object`"),
        (SERVING + "default_external_storage: {}", 3, "missing required field `endpoint`"),
        (SERVING + "default_external_storage: {endpoint: s3}", 3, "endpoint: 's3' is not a URL"),
        ("health_checks: {interval: 99ms}", 1, "interval: 99ms is too short: write at least 100ms"),
        ("health_checks: {interval: 0s}", 1, "interval: 0 is no interval"),
        ("health_checks: {timeout: 0ms}", 1, "timeout: lets no check pass"),
        ("health_checks: {timeout: 2}", 1, "timeout: 2 has no unit"),
        ("health_checks: {path: health}", 1, "path: 'health' is not a path: begin with /"),
        ("health_checks: {healthy_threshold: 0}", 1, "healthy_threshold: 0 is below 1"),
        ("health_checks: {unhealthy_threshold: 0}", 1, "unhealthy_threshold: 0 is below 1"),
        ("health_checks: {retries: 1}", 1, "unknown field `retries`"),
        ("resume: {max_moves: 0}", 1, "max_moves: 0 is below 1: .* write enabled: never"),
        ("resume: {max_regeneration: 10}", 1, "max_regeneration: 10 has no unit"),
        ("resume: {enabled: yes!}", 1, "resume.enabled: Invalid enum value 'yes!'$"),
        ("resume: {moves: 1}", 1, "unknown field `moves`"),
        ("backends: {}", 1, "backends: Expected `array`"),
        ("backends:\n- 3", 2, r"backends\[0\]: Expected `object`"),
        (FIRST + "- name: b", 4, r"backends\[1\]: Object missing required field `url`"),
        (FIRST + "- url: http://b", 4, r"backends\[1\]: Object missing required field `name`"),
        (FIRST + "  rule: decode", 4, r"backends\[0\].rule: Object contains unknown field `rule`"),
        (FIRST + "  role: decoder", 4, r"role: .*'decoder': a role is unified, prefill, decode"),
        (FIRST + "  weight: -1", 4, r"weight: -1 is below 1"),
        (FIRST + "  weight: 0", 4, r"weight: 0 is below 1"),
        (FIRST.replace("http:", "https:") + "  http2: true", 4, r"http2: is for URLs with http:"),
        (FIRST + "  weight: two", 4, "weight: Expected `int`, got `str`"),
        (FIRST + "  weight: true", 4, "weight: Expected `int`, got `bool`"),
        (FIRST + "  models: tiny", 4, "models: Expected `array`"),
        (FIRST + "- name: ''\n  url: http://b", 4, r"backends\[1\].name: is empty"),
        (FIRST + "  external_storage:\n    endpoint: storage:80", 5, "is not a URL"),
        (
            FIRST + "- url: http://b\n  name: a", 5,
            r"backends\[1\].name: 'a' is taken by the backend at .*:2: names are unique",
        ),
    ],
)  # fmt: skip
def test_an_error_has_file_line_and_field(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(DocumentError, match=f"^{tmp_path}/router.yaml:{line}: .*{says}") as caught:
        loaded(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["a:8000", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://[::1", ""]
)
def test_an_invalid_url_is_an_error(tmp_path: Path, url: str) -> None:
    with pytest.raises(DocumentError, match=r"router.yaml:3: backends\[0\].url: .* is not a URL"):
        loaded(tmp_path, f"backends:\n- name: a\n  url: '{url}'\n")


def test_a_variable_that_is_not_set_names_itself_and_its_line(tmp_path: Path) -> None:
    environment = {"STORAGE_ACCESS_KEY": "hush"}
    with pytest.raises(
        DocumentError,
        match=r"router.yaml:11: .*credentials\.secret_key: \$\{STORAGE_SECRET_KEY\} is not set",
    ) as caught:
        loaded(tmp_path, FULL, **environment)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "credentials",
    ["hush", {"access_key": "hush"}, {"access_key": "hush", "secret_key": ["hush"]},
     {"access_key": "hush", "secret_key": "hush", "region": "hush"}],
)  # fmt: skip
def test_credentials_of_another_shape_are_an_error_that_shows_none(
    tmp_path: Path, credentials: Any
) -> None:
    text = f"{FIRST}  external_storage:\n    endpoint: http://s\n    credentials: {credentials}\n"
    with pytest.raises(DocumentError, match="credentials") as caught:
        loaded(tmp_path, text)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["http://user:hush@s", "user:hush@s", "http://user:hush@:0", "s3://b?key=hush"]
)
def test_a_password_in_the_endpoint_is_an_error_that_shows_none(
    tmp_path: Path, endpoint: str
) -> None:
    text = f"disaggregated_serving: {{default_external_storage: {{endpoint: '{endpoint}'}}}}"
    with pytest.raises(
        DocumentError, match="endpoint: has a user, a password or a query"
    ) as caught:
        loaded(tmp_path, text)
    assert "hush" not in str(caught.value)


def test_external_storage_may_be_a_directory(tmp_path: Path) -> None:
    text = "disaggregated_serving: {default_external_storage: {endpoint: 'file:///mnt/kv'}}"
    config = loaded(tmp_path, text)
    storage = config.disaggregated_serving.default_external_storage
    assert storage is not None
    assert (storage.endpoint, storage.protocol) == ("file:///mnt/kv", None)


@pytest.mark.parametrize(
    "storage",
    ["{endpoint: 'file:///mnt', protocol: s3}", "{endpoint: 'http://s', protocol: file}",
     "{endpoint: 'file://host/mnt'}"],
)  # fmt: skip
def test_a_protocol_must_fit_the_endpoint(tmp_path: Path, storage: str) -> None:
    text = f"disaggregated_serving: {{default_external_storage: {storage}}}"
    with pytest.raises(DocumentError, match="default_external_storage"):
        loaded(tmp_path, text)


def test_storage_offloading_is_off_by_default(tmp_path: Path) -> None:
    assert not loaded(tmp_path, "backends: []").kv_cache_index.storage_offloading.enabled
    on = loaded(tmp_path, "kv_cache_index: {storage_offloading: {enabled: true}}")
    assert on.kv_cache_index.storage_offloading == StorageOffloading(True, 64 << 20)
    with pytest.raises(DocumentError, match=r"storage_offloading\.max_bytes: is too small"):
        loaded(tmp_path, "kv_cache_index: {storage_offloading: {max_bytes: 1000}}")
