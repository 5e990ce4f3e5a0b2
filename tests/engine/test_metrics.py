"""The metrics page as Prometheus reads it."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import metrics as names
from tandem_contract.timing import Timing
from tandem_engine.blocks import AllBlocksCleared, BlockEvent
from tandem_engine.metrics import EngineMetrics
from tandem_engine.types import PullResult

from .fake_engine import FakeStats


def _samples(metrics: EngineMetrics) -> dict[tuple[str, ...], float]:
    """Name and the labels that vary → value."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == "tiny"
                assert labels.pop("engine") == "0"
            samples[(sample.name, *labels.values())] = sample.value
    return samples


def test_what_the_engine_observes_is_counted_under_vllms_names() -> None:
    metrics = EngineMetrics("tiny")
    metrics.record_prefix_lookup(10, 4)
    metrics.record_external_lookup(6, 5)
    metrics.record_prompt(1, 4, 5)
    metrics.record_generated_tokens(3)
    metrics.record_preemption()
    metrics.record_pull(PullResult(tokens=5, bytes=4096, seconds=0.02))
    metrics.record_pull_failure()
    metrics.record_kv_expiry()
    samples = _samples(metrics)
    expected = {
        (names.ENGINE_PREFIX_QUERIES,): 10,
        (names.ENGINE_PREFIX_HITS,): 4,
        (names.ENGINE_EXTERNAL_QUERIES,): 6,
        (names.ENGINE_EXTERNAL_HITS,): 5,
        (names.ENGINE_PROMPT_TOKENS,): 10,
        (names.ENGINE_PROMPT_BY_SOURCE, "local_compute"): 1,
        (names.ENGINE_PROMPT_BY_SOURCE, "local_cache_hit"): 4,
        (names.ENGINE_PROMPT_BY_SOURCE, "external_kv_transfer"): 5,
        (names.ENGINE_GENERATION_TOKENS,): 3,
        (names.ENGINE_PREEMPTIONS,): 1,
        (names.ENGINE_XFER_SECONDS + "_count",): 1,
        (names.ENGINE_XFER_SECONDS + "_sum",): 0.02,
        (names.ENGINE_XFER_BYTES + "_sum",): 4096,
        (names.ENGINE_XFER_FAILED,): 1,
        (names.ENGINE_KV_EXPIRED,): 1,
    }
    assert {key: samples[key] for key in expected} == expected
    assert samples[(names.PROCESS_START_TIME,)] > 0
    assert not [name for name, *_ in samples if name.endswith("_created")]


def test_gauges_show_the_engine_at_the_scrape() -> None:
    stats = FakeStats()
    metrics = EngineMetrics("tiny")
    metrics.watch(lambda: stats, block_size=16, num_blocks=512)
    samples = _samples(metrics)
    expected = {
        (names.ENGINE_RUNNING,): 1,
        (names.ENGINE_WAITING,): 5,
        (names.ENGINE_WAITING_BY_REASON, "capacity"): 3,
        (names.ENGINE_WAITING_BY_REASON, "deferred"): 2,
        (names.ENGINE_KV_USAGE,): 0.25,
        (names.ENGINE_CACHE_CONFIG, "16", "512"): 1,
    }
    assert {key: samples[key] for key in expected} == expected
    stats = FakeStats(running=7)
    assert _samples(metrics)[(names.ENGINE_RUNNING,)] == 7
    assert 3 in [value for (name, *_), value in samples.items() if name == names.ENGINE_HELD]


def test_a_sequences_times() -> None:
    metrics = EngineMetrics("tiny")
    times = metrics.start_sequence()
    for _ in range(3):
        times.observe_tokens()
    times.observe_end("stop")
    samples = _samples(metrics)
    assert samples[(names.ENGINE_TTFT_SECONDS + "_count",)] == 1
    assert samples[(names.ENGINE_ITL_SECONDS + "_count",)] == 2
    assert samples[(names.ENGINE_E2E_SECONDS + "_count",)] == 1
    assert samples[(names.ENGINE_SUCCESS, "stop")] == 1
    assert samples[(names.ENGINE_SUCCESS, "error")] == 0


def test_block_events_are_handed_on() -> None:
    forwarded: list[BlockEvent] = []
    EngineMetrics("tiny", forwarded.append).record_kv_event(AllBlocksCleared())
    EngineMetrics("tiny").record_kv_event(AllBlocksCleared())
    assert forwarded == [AllBlocksCleared()]


def test_the_prefill_of_a_sequence_is_observed_at_its_end() -> None:
    metrics = EngineMetrics("tiny")
    times = metrics.start_sequence()
    times.observe_tokens()
    times.observe_tokens()
    assert _samples(metrics)[(names.ENGINE_PREFILL_SECONDS + "_count",)] == 0
    times.observe_end("length", Timing(queue=0.25, compute=0.5, cached=16, computed=48))
    metrics.start_sequence().observe_end("abort")
    samples = _samples(metrics)
    expected = {
        (names.ENGINE_QUEUE_SECONDS + "_sum",): 0.25,
        (names.ENGINE_PREFILL_SECONDS + "_sum",): 0.5,
        (names.ENGINE_PREFILL_SECONDS + "_count",): 1,
        (names.ENGINE_PREFILL_TOKENS + "_sum",): 48,
    }
    assert {key: samples[key] for key in expected} == expected
    decoding = samples[(names.ENGINE_DECODE_SECONDS + "_sum",)]
    assert 0 < decoding == samples[(names.ENGINE_ITL_SECONDS + "_sum",)]
