"""The figures in engines' metrics pages, and that a remembered layout changes none of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import metrics as names
from tandem_contract import vllm_storage
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.page_reader import PageReader, read_page
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges

from .engine_pages import VllmPage

PAGE = f"""# HELP {names.ENGINE_RUNNING} Number of requests in model execution batches.
# TYPE {names.ENGINE_RUNNING} gauge
{names.ENGINE_RUNNING}{{engine="0",model_name="a }} b"}} 3.0
{names.ENGINE_RUNNING}{{engine="1",model_name="m"}} 4.0
{names.ENGINE_WAITING}_by_reason{{reason="capacity"}} 99.0
{names.ENGINE_WAITING_BY_REASON}{{reason="deferred"}} 1.0
{names.ENGINE_WAITING}{{engine="0"}} 2.0 1395066363000
{names.ENGINE_KV_USAGE}{{engine="0"}} 0.5
{names.ENGINE_KV_USAGE}{{engine="1"}} 0.25
{names.ENGINE_CACHE_CONFIG}{{block_size="32",num_gpu_blocks="512"}} 1.0
{names.PROCESS_START_TIME} 1.7e+09"""


def test_a_page_is_read() -> None:
    report = read_page(PAGE.encode())
    assert report.gauges == Gauges(running=7.0, waiting=2.0, kv_usage=0.375, deferred=1.0)
    assert (report.block_tokens, report.blocks) == (32, 512)
    assert report.incarnation != read_page(PAGE.replace("1.7e", "1.8e").encode()).incarnation
    assert report.incarnation == read_page(PAGE.replace("3.0", "5.0").encode()).incarnation


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"# nothing here\n", b"vllm:num_requests"])
def test_a_page_without_the_figures_is_no_error(page: bytes) -> None:
    report = read_page(page)
    assert report.gauges == Gauges()
    assert (report.block_tokens, report.blocks, report.incarnation) == (None, None, b"")
    assert report.counters == EngineCounters()
    assert report.adapters is None


def test_a_value_that_is_no_finite_number_is_left_out() -> None:
    page = f"{names.ENGINE_RUNNING} NaN\n{names.ENGINE_WAITING} +Inf\n{names.ENGINE_KV_USAGE} x\n"
    assert read_page(page.encode()).gauges == Gauges()


def test_the_counters_of_a_page() -> None:
    page = VllmPage()
    labels = (page.model, "0")
    page.prefill.labels(*labels).observe(0.5)
    page.prefill.labels(*labels).observe(1.5)
    page.prefill_tokens.labels(*labels).observe(900)
    page.decode.labels(*labels).observe(0.75)
    page.queue.labels(*labels).observe(0.25)
    page.itl.labels(*labels).observe(0.125)
    page.by_source.labels(*labels, names.PromptSource.COMPUTED).inc(1000)
    page.by_source.labels(*labels, names.PromptSource.CACHED).inc(50)
    page.by_source.labels(*labels, names.PromptSource.EXTERNAL).inc(150)
    page.prompt.labels(*labels).inc(1200)
    page.generated.labels(*labels).inc(70)
    page.preemptions.labels(*labels).inc(2)
    assert read_page(page.body()).counters == EngineCounters(
        prefill_seconds=2.0,
        prefills=2.0,
        prefill_tokens=900.0,
        computed_tokens=1000.0,
        prompt_tokens=1200.0,
        external_tokens=150.0,
        decode_seconds=0.75,
        queue_seconds=0.25,
        queued=1.0,
        itl_seconds=0.125,
        itls=1.0,
        generated_tokens=70.0,
        preemptions=2.0,
    )


def test_tokens_by_source_follow_from_hits_where_sources_are_not_told_apart() -> None:
    page = VllmPage()
    page.prompt.labels(page.model, "0").inc(1000)
    page.hits.labels(page.model, "0").inc(300)
    page.external_hits.labels(page.model, "0").inc(200)
    counters = read_page(page.body()).counters
    assert counters.computed_tokens == 500
    assert (counters.prompt_tokens, counters.external_tokens) == (1000, 200)


def test_each_rank_has_its_own_figures() -> None:
    page = VllmPage(engines=(0, 1))
    page.running.labels(page.model, "1").set(4)
    page.by_reason.labels(page.model, "1", "deferred").set(3)
    page.prefill.labels(page.model, "0").observe(2)
    read = PageReader().read(page.body())
    assert [rank.gauges.running for rank in read.ranks] == [0, 4]
    assert [rank.gauges.deferred for rank in read.ranks] == [0, 3]
    assert [rank.counters.prefills for rank in read.ranks] == [1, 0]
    assert [rank.blocks for rank in read.ranks] == [512, 513]
    assert read.ranks[0].incarnation != b""
    page.adapters(2, "a", "", at=1.0)
    with_adapters = PageReader().read(page.body())
    assert with_adapters.total.adapters is not None
    assert with_adapters.ranks[0].adapters is None, "the page does not say on which rank"
    assert read.total.gauges.running == 4


@pytest.mark.parametrize("engines", [(0,), (3,), (2, 3)])
def test_one_engine_or_a_part_of_the_ranks_is_one_endpoint(engines: tuple[int, ...]) -> None:
    assert PageReader().read(VllmPage(engines).body()).ranks == ()


def test_the_newest_sample_names_the_adapters_in_use() -> None:
    page = VllmPage()
    reader = PageReader()
    page.adapters(2, "", "", at=1.0)
    assert reader.read(page.body()).total.adapters == AdapterSlots(slots=2)
    page.adapters(2, "a,b", "c", at=2.0)
    in_use = AdapterSlots(frozenset("ab"), frozenset("c"), 2)
    assert reader.read(page.body()).total.adapters == in_use
    page.adapters(2, "", "", at=3.0)
    assert reader.read(page.body()).total.adapters == AdapterSlots(slots=2)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.floats(0, 1e12), st.integers(0, 10**15), st.booleans()),
        max_size=6,
    )
)
def test_a_remembered_layout_changes_no_figure(
    steps: list[tuple[int, float, int, bool]],
) -> None:
    page, reader = VllmPage(engines=(0, 1)), PageReader()
    for engine, gauge, count, is_new_series in steps:
        labels = (page.model, str(engine))
        page.running.labels(*labels).set(gauge)
        page.kv_usage.labels(*labels).set(gauge)
        page.prefill.labels(*labels).observe(count)
        page.generated.labels(*labels).inc(count)
        if is_new_series:
            page.by_source.labels(*labels, names.PromptSource.COMPUTED).inc(count)
        body = page.body()
        assert reader.read(body) == PageReader().read(body)


def test_a_line_that_moves_far_is_still_read() -> None:
    reader = PageReader()
    for padding in (0, 5000, 20):
        page = f"# {'x' * padding}\n{names.ENGINE_RUNNING} {padding}.0\n"
        assert reader.read(page.encode()).total.gauges.running == padding


def test_loads_from_storage_are_read_of_both_engines() -> None:
    torch = f"""
{names.ENGINE_TIER_LOADED}{{tier="host"}} 5.0
{names.ENGINE_TIER_LOADED}{{tier="storage"}} 512.0
{names.ENGINE_STORAGE_LOAD_BYTES} 1024.0
{names.ENGINE_STORAGE_LOAD_SECONDS}_count 2.0
{names.ENGINE_STORAGE_LOAD_SECONDS}_sum 0.5"""
    vllm = f"""
{vllm_storage.LOADED_TOKENS}_total{{engine="0"}} 512.0
{vllm_storage.LOADED_BYTES}_total{{engine="0"}} 1024.0
{vllm_storage.LOAD_SECONDS}_count{{engine="0"}} 2.0
{vllm_storage.LOAD_SECONDS}_sum{{engine="0"}} 0.5"""
    loads = EngineCounters(loaded_bytes=1024.0, loaded_tokens=512.0, load_seconds=0.5, loads=2.0)
    assert read_page(torch.encode()).counters == loads
    assert read_page(vllm.encode()).counters == loads
