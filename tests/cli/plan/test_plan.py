"""`tandem plan`: its answer, its files, its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tandem_cli.main import main
from tandem_cli.plan.inputs import InputError, read_model, read_slo, read_workload
from tandem_contract.documents import load_documents
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

QUICK = ("--gpu", "h100", "--workload", "fixed")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["plan", *args])


def answer(*args: str) -> dict[str, Any]:
    result = run(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """An answer, which takes seconds."""
    return answer("llama-3.1-8b", *QUICK, "--rate", "5")


@pytest.mark.long
def test_the_answer_has_bounds_a_runner_up_and_the_network(found: dict[str, Any]) -> None:
    best, *others = found["options"]
    assert others
    assert {option["architecture"] for option in found["options"]} == {"split", "co-located"}
    assert not found["is_calibrated"]
    for option in found["options"]:
        assert option["figures"]["attainment"]["value"] >= 0.9
        for figure in option["figures"].values():
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert best["gpus"]["low"] <= best["gpus"]["value"] <= others[0]["gpus"]["value"]
    network = found["network"]
    # 32 layers × 8 heads × 128 × 2 × 2 bytes.
    assert network["kv_bytes"] == network["prompt_tokens"] * 131_072
    assert network["least_rate"] == pytest.approx(network["kv_bytes"] / (network["prefill"] / 2))
    assert found["binding"]


@pytest.mark.long
def test_the_same_seed_gives_the_same_answer(found: dict[str, Any]) -> None:
    assert answer("llama-3.1-8b", *QUICK, "--rate", "5") == found


@pytest.mark.long
@pytest.mark.parametrize("slo", ["ttft=2s,itl=50ms", "ttft=2s,itl=14ms"])
def test_rendered_pools_are_valid_and_have_the_planned_pods(tmp_path: Path, slo: str) -> None:
    file = tmp_path / "pools.yaml"
    found = answer(
        "llama-3.3-70b", *QUICK, "--rate", "4", "--prompt-tokens", "3000", "--slo", slo,
        "--kv-cache-dtype", "fp8", "--render", str(file),
    )  # fmt: skip
    best = found["options"][0]
    (pool_set,) = parse_pools(load_documents(file))
    rendered = pods(pool_set)
    pools = [best["prefill"], best["decode"]] if best["prefill"] else [best["decode"]]
    assert len(rendered) == sum(pool["replicas"] for pool in pools)
    gpus = [_gpus(pod) for pod in rendered]
    assert sum(gpus) == best["gpus"]["value"]
    command = " ".join(rendered[0]["spec"]["containers"][0]["args"])
    assert "--kv-cache-dtype" in command or "fp8" in json.dumps(rendered[0])


@pytest.mark.long
def test_the_page_starts_with_the_planned_pods(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = answer("llama-3.1-8b", *QUICK, "--rate", "5", "--slo", "itl=20ms", "--html", str(file))
    (script,) = re.findall(r'id="page-data">(.*)</script>', file.read_text("utf-8"))
    shown = json.loads(script)
    split = next(each for each in found["options"] if each["architecture"] == "split")
    together = next(each for each in found["options"] if each["architecture"] == "co-located")
    assert shown["prefill"]["tensor"] == split["prefill"]["tensor"]
    start = shown["start"]
    assert [start["prefills"], start["decodes"], start["colocated"]] == [
        *(split["prefill"]["replicas"], split["decode"]["replicas"]),
        together["decode"]["replicas"],
    ]
    assert (start["rate"], start["itl"]) == (5, 20)
    assert "For the fixed workload" in shown["answer"]
    assert not shown["isCalibrated"]


SCARCE = (
    *("deepseek-v3", "--gpu", "h200", "--gpu-memory-utilization", "0.62", "--workload", "fixed"),
    *("--prompt-tokens", "200", "--output-tokens", "50"),
)
"""With room for short requests only."""


@pytest.mark.long
def test_a_page_needs_no_more_room_than_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = run(*SCARCE, "--rate", "1", "--html", str(file))
    assert result.exit_code == 0, result.output
    assert "within SLO" in result.output
    assert "<h1>" in file.read_text("utf-8")


@pytest.mark.long
def test_an_answer_without_a_page_is_still_said(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = run(*SCARCE, "--gpus", "8", "--html", str(file))
    assert result.exit_code == 1, result.output
    assert "within SLO" in result.stdout
    assert f"--html {file}: no page: does not fit: 8 × H200" in result.stderr
    assert not file.exists()


def _gpus(pod: dict[str, Any]) -> int:
    limits = [c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"]]
    return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)


@pytest.mark.long
def test_the_table_says_that_nothing_was_measured() -> None:
    result = run("llama-3.1-8b", *QUICK, "--rate", "5")
    assert result.exit_code == 0, result.output
    assert "Not calibrated" in result.stdout
    assert "What binds: " in result.stdout
    assert "Gbit/s" in result.stdout


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["llama-3.1-8b", "--gpu", "h100"], 2, "give --rate or --gpus"),
        (["llama-3.1-8b", "--gpu", "v100", "--rate", "1"], 2, "'v100' is not one of 'a100'"),
        (["nothing-70b", *QUICK, "--rate", "1"], 2, "no such file or directory, nor one of"),
        (["llama-3.1-8b", *QUICK, "--rate", "1", "--slo", "ttft=2"], 2, "is not a duration"),
        (["llama-3.1-8b", *QUICK, "--rate", "1", "--slo", "p99=2s"], 2, "write ttft=2s,itl=50ms"),
        (["llama-3.1-8b", *QUICK, "--rate", "1", "--slo", "itl=0ms"], 2, "must be above 0"),
        (["llama-3.1-8b", "--gpu", "h100", "--rate", "1", "--workload", "poems"], 2, "neither a"),
        (
            ["llama-3.1-8b", "--gpu", "h100", "--rate", "1", "--workload", "multi-turn"],
            2, "several turns are not simulated",
        ),
        (
            ["llama-3.1-8b", *QUICK, "--rate", "1", "--slo", "itl=1ms"],
            1, "itl is below one decode step",
        ),
        (["deepseek-v3", "--gpu", "l40s", "--rate", "1"], 1, "does not fit: 8 × L40S 48 GB"),
        (
            ["llama-3.1-8b", "--gpu", "l40s", "--rate", "1", "--fabric", "nvlink"],
            1, "no NVLink",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(args: list[str], status: int, message: str) -> None:
    result = run(*args)
    assert result.exit_code == status
    assert message in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.lower().startswith("error")]
    assert len(lines) == 1


def test_a_model_is_read_from_a_directory_with_the_size_of_its_weights(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, weights = read_model(str(tmp_path))
    assert (shape.hidden, weights) == (64, None)
    index = {"metadata": {"total_size": 12345}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model(str(tmp_path / "config.json"))[1] == 12345.0


@pytest.mark.parametrize("text", ["", "[]", '{"hidden_size": 64}', "\x00"])
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        read_model(str(file))


def test_an_slo_may_leave_parts_out() -> None:
    slo = read_slo("itl=50ms, e2e=1m")
    assert (slo.ttft, slo.itl, slo.e2e) == (None, 0.05, 60.0)


def test_documents_of_rag_are_shared_and_questions_are_not() -> None:
    requests = read_workload("rag", seed=1).requests
    firsts = [request.blocks[0] for request in requests if request.blocks]
    assert len(set(firsts)) <= 100
    assert len(firsts) > 0.9 * len(requests)
    longest = max(requests, key=lambda request: len(request.blocks))
    assert len(longest.blocks) <= longest.prompt_tokens // 512


def test_a_trace_comes_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3 + i]}
        for i in range(11)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    workload = read_workload(str(file), seed=1)
    requests = workload.at(5.0)
    assert requests[-1].at == pytest.approx(2.0)
    assert {request.blocks for request in requests} == {(1, 2)}


def test_the_share_of_long_prompts_is_a_setting() -> None:
    def share(long: float) -> float:
        requests = read_workload("bimodal", long=long, seed=1).requests
        return sum(request.prompt_tokens >= 2000 for request in requests) / len(requests)

    assert share(0.0) == 0
    assert share(0.6) == pytest.approx(0.6, abs=0.03)
    with pytest.raises(InputError, match="only bimodal"):
        read_workload("chat", long=0.5)
