"""Which engines share KV, and which vLLM does not start with the connector."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem_vllm_storage.identity import check_engine, identities, weights_identity
from tandem_vllm_storage.messages import RankLayout
from tandem_vllm_storage.plan import first_chunk, load_span, savable_tokens, storable_prompt
from tandem_vllm_storage.settings import StorageConfigError, StorageSettings, parse_settings

SETTINGS = StorageSettings(endpoint="http://store:8080")


class FullAttentionSpec:
    """Named as vLLM's."""


class SlidingWindowSpec:
    """Named as vLLM's."""


def engine() -> Any:
    """vLLM's configuration, as far as the connector reads it."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, calculate_kv_scales=False, cache_dtype="auto", block_size=16
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype="bfloat16",
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1.0, "_name_or_path": "x"}),
            get_num_kv_heads=lambda _: 8,
            get_head_size=lambda: 128,
        ),
    )


def cache(*kinds: type) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
    )


def test_an_engine_that_fits_is_accepted() -> None:
    check_engine(engine(), cache(FullAttentionSpec))


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "set it to 'recompute'"),
        ("cache_config", "enable_prefix_caching", False, "--no-enable-prefix-caching"),
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
    ],
)
def test_settings_are_refused_by_name(part: str, name: str, value: object, message: str) -> None:
    config = engine()
    setattr(getattr(config, part), name, value)
    with pytest.raises(StorageConfigError, match=message):
        check_engine(config, cache(FullAttentionSpec))


def test_weights_that_are_replaced_in_place_are_refused() -> None:
    config = engine()
    config.weight_transfer_config = object()
    with pytest.raises(StorageConfigError, match="--weight-transfer-config"):
        check_engine(config, cache(FullAttentionSpec))


@pytest.mark.parametrize("kinds", [(SlidingWindowSpec,), (FullAttentionSpec, SlidingWindowSpec)])
def test_blocks_without_all_tokens_are_refused(kinds: tuple[type, ...]) -> None:
    with pytest.raises(StorageConfigError, match="--disable-hybrid-kv-cache-manager"):
        check_engine(engine(), cache(*kinds))


def change(config: Any, part: str, **values: object) -> None:
    for name, value in values.items():
        setattr(getattr(config, part), name, value)


@pytest.mark.parametrize(
    "different",
    [
        pytest.param(lambda c: change(c, "cache_config", cache_dtype="fp8"), id="cache type"),
        pytest.param(lambda c: change(c, "cache_config", block_size=32), id="block size"),
        pytest.param(lambda c: change(c, "model_config", dtype="float16"), id="data type"),
        pytest.param(lambda c: change(c, "model_config", quantization="awq"), id="quantization"),
        pytest.param(
            lambda c: change(c, "model_config", quantization_config={"ignore": ["lm_head"]}),
            id="settings of quantization",
        ),
        pytest.param(lambda c: change(c, "model_config", code_revision="v2"), id="code"),
        pytest.param(lambda c: change(c, "model_config", get_num_kv_heads=lambda _: 4), id="heads"),
        pytest.param(
            lambda c: change(
                c,
                "model_config",
                hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 2.0}),
            ),
            id="rope",
        ),
    ],
)
def test_engines_that_differ_share_nothing(different: Callable[[Any], None]) -> None:
    layout = RankLayout((0, 1), (0, 1), "layout", "bfloat16", 2, 1024)
    config, other = engine(), engine()
    different(other)
    [first] = identities(config, SETTINGS, "w", [layout])
    [second] = identities(other, SETTINGS, "w", [layout])
    assert first.digest() != second.digest()


def test_the_place_of_the_model_does_not_matter_and_the_rank_does() -> None:
    layouts = [RankLayout((rank, 2), (0, 1), "layout", "bfloat16", 2, 1024) for rank in (1, 0)]
    elsewhere = engine()
    config = {"rope_theta": 1.0, "_name_or_path": "/elsewhere"}
    change(elsewhere, "model_config", hf_config=SimpleNamespace(to_dict=lambda: config))
    first, second = identities(engine(), SETTINGS, "w", layouts)
    assert (first, second) == identities(elsewhere, SETTINGS, "w", layouts)
    assert [i.tensor_parallel for i in (first, second)] == [(0, 2), (1, 2)]


def test_weights_are_a_commit_or_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, commit = engine(), "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit
    snapshot.mkdir(parents=True)
    change(config, "model_config", model=str(snapshot))
    assert weights_identity(config, SETTINGS) == commit

    change(config, "model_config", model=str(tmp_path))
    with pytest.raises(StorageConfigError, match="no weights in files"):
        weights_identity(config, SETTINGS)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_identity(config, SETTINGS)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert weights_identity(config, SETTINGS) != first
    named = StorageSettings(endpoint="http://store:8080", weights="v1")
    assert weights_identity(config, named) == "v1"


def test_weights_that_are_made_up_are_no_models_weights() -> None:
    config = engine()
    config.load_config = SimpleNamespace(load_format="dummy")
    named = StorageSettings(endpoint="http://store:8080", weights="v1")
    assert weights_identity(config, SETTINGS) == weights_identity(config, named) == "dummy"


def test_the_weights_of_a_draft_model_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def written(name: str, content: bytes) -> SimpleNamespace:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_bytes(content)
        return SimpleNamespace(model=str(tmp_path / name), revision=None)

    def weights(draft: SimpleNamespace | None) -> str:
        config = engine()
        change(config, "model_config", model=written("model", b"model").model)
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        return weights_identity(config, SETTINGS)

    alone, first = weights(None), weights(written("draft", b"one"))
    assert len({alone, first, weights(written("draft", b"other"))}) == 3
    # Layers of the model itself that draft, and drafts without a model.
    assert weights(written("model", b"model")) == alone


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "endpoint"),
        ({"endpoint": "http://s:1", "chunk": 1}, "chunk"),
        ({"endpoint": "http://s:1", "chunk_tokens": 100}, "multiple of --block-size 16"),
        ({"endpoint": "http://user:pw@s:1"}, "put keys into a Secret"),
        ({"endpoint": "http://s:1", "weights": ""}, "weights is empty"),
    ],
)
def test_settings_are_checked(extra: dict[str, object], message: str) -> None:
    with pytest.raises(StorageConfigError, match=message) as error:
        parse_settings(extra, 16)
    assert "pw" not in str(error.value)


HASH = "0123456789abcdef" * 4


def test_media_without_a_hash_of_their_content_and_embeddings_are_not_stored() -> None:
    def described(media: list[tuple[int, str | None]], has_embeddings: bool = False) -> object:
        return storable_prompt(
            [1], cache_salt=None, adapter="", media=media, has_embeddings=has_embeddings
        )

    assert described([(0, HASH)]) is not None
    assert described([(0, f"adapter:{HASH}"), (8, 2 * HASH)]) is not None
    assert described([(0, None)]) is None
    # What a client calls its image: another one may have the same name.
    assert described([(0, HASH), (8, "logo")]) is None
    assert described([(0, "123e4567-e89b-12d3-a456-426614174000")]) is None
    assert described([], has_embeddings=True) is None


def test_plans() -> None:
    # A prompt of two chunks of which one is cached; of which all but the last token is.
    assert first_chunk(8, 16, 8) == 1
    assert first_chunk(15, 16, 8) is None
    assert first_chunk(0, 7, 8) is None
    # 4 tokens of the first chunk are cached: its first block is not written.
    assert load_span(4, 12, 4, 8) == (range(4), 1)
    # Drafts and the newest token are not final.
    assert savable_tokens(10, 5, prompt=12, known=14) == 13
    assert savable_tokens(0, 8, prompt=12, known=12) == 8
