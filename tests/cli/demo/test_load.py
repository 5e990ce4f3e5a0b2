from dataclasses import replace
from pathlib import Path

from tandem_cli.demo import load
from tandem_loadtest.calls import Answer, Call, Result
from tandem_loadtest.workload.conversations import Shape, workload

MODEL = load.Model(context=1024, has_chat_template=True)


def test_a_trace_is_scaled_into_the_context(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 6000, "output_length": 500, "hash_ids": [0,1,2,3,4,5,6,7,8,9,10,11]}\n'  # noqa: E501
        '{"timestamp": 250, "input_length": 1000, "output_length": 5, "hash_ids": [0, 12]}\n'
    )
    long, short = load.trace_calls(trace, None, MODEL, seed=0)
    assert (long.at, short.at) == (0.0, 0.25)
    assert len(long.call.prompt) + long.call.max_tokens <= MODEL.context
    assert long.call.prompt[:64] == short.call.prompt[:64]
    assert long.call.ignore_eos


async def test_results_keep_the_order_of_the_scripts() -> None:
    reported: list[Result] = []

    async def send(call: Call) -> Result:
        return Result(call, 200, answer=Answer("yes", (1,), "length"))

    scripts = workload(Shape(groups=1, users=2, turns=2, shorts=1))
    results = await load.run_scripts(send, scripts, reported.append)
    assert len(results) == len(reported) == sum(len(s.steps) for s in scripts)
    assert results[1].call == scripts[0].call(1, ["yes"])


async def test_expected_answers_are_requested_unstreamed_and_none_on_failure() -> None:
    async def send(call: Call) -> Result:
        assert not call.stream
        failed = call.prompt == "bad"
        return Result(call, answer=Answer("yes", (1,)), error="HTTP 500" if failed else None)

    good, bad = (load.unstreamed(Call(text, max_tokens=1)) for text in ("good", "bad"))
    answers = await load.expected_answers(send, [good, bad], lambda _: None)
    assert answers == {good: Answer("yes", (1,)), bad: None}


def test_a_model_without_a_chat_template_is_sent_completions() -> None:
    without_template = replace(MODEL, has_chat_template=False)
    assert any(script.chat for script in load.scripts_for(MODEL, Shape(), 0))
    assert not any(script.chat for script in load.scripts_for(without_template, Shape(), 0))
